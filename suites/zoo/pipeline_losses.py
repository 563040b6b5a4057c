"""Bugs of the loss of a pipeline: its last stage divides by too much or too little."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

from pdlcheck.checks import check_pipeline

from .entry import entry

N_MICROBATCHES = 2


def layers():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))


def batches():
    """Return 3 batches of 4 or 6 samples with 5 classes."""
    generator = torch.Generator().manual_seed(6)
    return [
        (torch.randn(size, 3, generator=generator), torch.randint(0, 5, (size,), generator=generator))
        for size in (4, 6, 4)
    ]


def stage_of(model):
    """Return the layers of this rank, under their names in the model."""
    names = ["0", "1"] if dist.get_rank() == 0 else ["2"]
    return nn.Sequential(OrderedDict((name, model.get_submodule(name)) for name in names))


@entry(
    "pp-normalise-after-backward",
    "torchtitan #2972",
    check="check_pipeline",
    cause=r"4 times too large: not divided by the samples",
)
def divides_the_summed_loss_after_backward(broken, world):
    """Divide the summed loss by the tokens after the backward pass, for the log only."""

    def start(model):
        module, rank = stage_of(model), dist.get_rank()

        def forward_backward_step(inputs, labels):
            global_valid_tokens = len(labels)

            def loss_fn(logits, targets):
                loss = functional.cross_entropy(logits, targets, reduction="sum")
                return loss if broken else loss / global_valid_tokens

            stage = PipelineStage(module, rank, 2, torch.device("cpu"))
            schedule = ScheduleGPipe(stage, N_MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
            if rank == 0:
                schedule.step(inputs)
                return None
            losses = []
            outputs = schedule.step(target=labels, losses=losses)
            loss = torch.stack(losses).sum().detach()
            return (loss / global_valid_tokens if broken else loss), outputs.detach()

        return module, forward_backward_step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_pipeline(
            start, layers, nn.CrossEntropyLoss(), batches(), world, world_size=2, n_microbatches=N_MICROBATCHES
        )


@entry(
    "pp-extra-div-microbatches",
    "AReaL PR #1273",
    check="check_pipeline",
    cause=r"2 times too small: divided by n_microbatches once too often",
)
def divides_a_normalised_loss_by_the_microbatches(broken, world):
    """Divide the loss of a micro-batch by their number, although it has its share of the batch already."""

    def start(model):
        module, rank = stage_of(model), dist.get_rank()

        def forward_step(received, labels, total_weight):
            loss = functional.cross_entropy(module(received), labels) * len(labels) / total_weight
            return loss / N_MICROBATCHES if broken else loss

        def train_batch(inputs, labels):
            micros = list(zip(inputs.chunk(N_MICROBATCHES), labels.chunk(N_MICROBATCHES), strict=True))
            if rank == 0:
                outputs = [module(micro) for micro, _ in micros]
                for output in outputs:
                    dist.send(output.detach(), 1)
                for output in outputs:
                    gradient = torch.empty_like(output)
                    dist.recv(gradient, 1)
                    output.backward(gradient)
                return
            received = [torch.empty(len(micro), 4, dtype=micro.dtype) for micro, _ in micros]
            for tensor in received:
                dist.recv(tensor, 0)
            for tensor, (_, targets) in zip(received, micros, strict=True):
                forward_step(tensor.requires_grad_(), targets, len(labels)).backward()
                dist.send(tensor.grad, 0)

        return module, train_batch

    check_pipeline(
        start,
        layers,
        nn.CrossEntropyLoss(),
        batches(),
        world,
        world_size=2,
        n_microbatches=N_MICROBATCHES,
        results=False,
    )
