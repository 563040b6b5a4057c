"""Bugs of pipeline stages that are made anew during a step."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from pdlcheck.checks import check_pipeline

from .entry import entry
from .pipeline_losses import stage_of

WIDTH, OUTPUTS, N_MICROBATCHES = 3, 5, 4


class OfEach(nn.Sequential):
    """Layers for a batch that consists of several batches."""

    def forward(self, inputs):
        return tuple(super(OfEach, self).forward(x) for x in inputs)


def squared_errors(outputs, targets):
    pairs = zip(outputs, targets, strict=True)
    return sum((output - target).square().sum() for output, target in pairs)


def accumulated(*lengths):
    """Return two batches of 2 sequences, each of its length, for one step."""
    generator = torch.Generator().manual_seed(lengths[0])
    return tuple(
        tuple(torch.randn(2, length, width, generator=generator) for length in lengths) for width in (WIDTH, OUTPUTS)
    )


@entry(
    "pp-reset-drops-gradients",
    "Automodel PR #3530",
    check="check_pipeline",
    judged="none",
    why="no candidate leaves out a part of the batch where a batch is a tuple",
)
def initialises_stages_at_a_new_length(broken, world):
    """Make the stages anew where the length of sequences changes, and drop the gradients of the step so far."""

    def start(model):
        module, rank = stage_of(model), dist.get_rank()
        schedules = {}

        def schedule_for(length):
            if length not in schedules:
                schedules.clear()
                example = torch.empty(1, length, 4 if rank else WIDTH, dtype=torch.float64)
                stage = PipelineStage(module, rank, 2, torch.device("cpu"), input_args=(example,))
                loss_fn = nn.MSELoss(reduction="sum")
                schedules[length] = ScheduleGPipe(stage, 2, loss_fn=loss_fn, scale_grads=False)
                if broken:
                    module.zero_grad()
            return schedules[length]

        def train_step(inputs, targets):
            for x, y in zip(inputs, targets, strict=True):
                schedule = schedule_for(x.shape[1])
                schedule.step(target=y) if rank else schedule.step(x)

        return module, train_step

    def layers():
        return OfEach(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, OUTPUTS))

    batches = [accumulated(5, 3), accumulated(4, 4), accumulated(6, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_pipeline(
            start,
            layers,
            squared_errors,
            batches,
            world,
            world_size=2,
            n_microbatches=N_MICROBATCHES,
            results=False,
        )
