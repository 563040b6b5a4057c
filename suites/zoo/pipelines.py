"""Bugs of pipelines: two stages that exchange activations and gradients of micro-batches."""

from __future__ import annotations

from functools import partial
from itertools import chain, cycle

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_pipedream, check_pipeline

from .entry import entry

HIDDEN, N_MICROBATCHES = 4, 3


def make():
    return nn.Sequential(nn.Linear(5, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2))


def sequences(*sizes):
    """Return batches of padded sequences of 1 to 5 numbers, with targets."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for size in sizes:
        lengths = torch.randint(1, 6, (size, 1), generator=generator)
        inputs = torch.randn(size, 5, generator=generator) * (torch.arange(5) < lengths)
        batches.append((inputs, torch.randn(size, 2, generator=generator)))
    return batches


def stage_of(model):
    """Return the layers of this rank, under their names in the model."""
    stage = nn.Sequential()
    for name in ("0", "1") if dist.get_rank() == 0 else ("2",):
        stage.add_module(name, model.get_submodule(name))
    return stage


def recv_forward(rows, *, requires_grad=True):
    received = torch.empty(rows, HIDDEN, dtype=torch.float64)
    dist.recv(received, 0)
    return received.requires_grad_(requires_grad)


def gpipe(stage, inputs, targets, *, requires_grad=True):
    """Take the micro-batches forward and back; return loss and outputs on the last stage."""
    if dist.get_rank() == 0:
        outputs = [stage(micro) for micro in inputs]
        for output in outputs:
            dist.send(output.detach(), 1)
        for output in outputs:
            grad = torch.empty_like(output)
            dist.recv(grad, 1)
            output.backward(grad)
        return None
    total = sum(len(target) for target in targets)
    received = [recv_forward(len(target), requires_grad=requires_grad) for target in targets]
    outputs = [stage(one) for one in received]
    losses = [nn.functional.mse_loss(*pair) * len(pair[1]) / total for pair in zip(outputs, targets, strict=True)]
    for loss in losses:
        loss.backward()
    for one in received:
        dist.send(torch.zeros_like(one) if one.grad is None else one.grad, 0)
    return sum(losses).detach(), [output.detach() for output in outputs]


def check(step_of, world):
    def start(model):
        stage = stage_of(model)
        return stage, partial(step_of, stage)

    batches = sequences(6, 9, 6)
    check_pipeline(start, make, nn.MSELoss(), batches, world, world_size=2, n_microbatches=N_MICROBATCHES)


@entry(
    "pp-output-order",
    "SkyRL #1865, PR #2096, PR #2209",
    check="check_pipeline",
    cause="the outputs are right and stand at other samples, in the order .*: parts were put together in another way",
)
def returns_outputs_in_packed_order(broken, world):
    """Micro-batches are packed by the lengths of sequences, and their outputs are returned in that order."""

    def forward_backward(stage, inputs, targets):
        packed = (inputs != 0).sum(1).argsort(descending=True, stable=True)
        result = gpipe(stage, inputs[packed].tensor_split(N_MICROBATCHES), targets[packed].tensor_split(N_MICROBATCHES))
        if result is None:
            return None
        log_probs = torch.cat(result[1])
        return result[0], log_probs if broken else log_probs[packed.argsort()]

    check(forward_backward, world)


@entry(
    "pp-same-input-each-micro",
    "AiDotNet PR #845",
    check="check_pipeline",
    cause="every micro-batch has the outputs of micro-batch 0: one input was sent again",
)
def takes_the_first_slice_for_every_microbatch(broken, world):
    """Each micro-batch is cut from the start of the batch, not from its own place."""

    def slice_input(x, i):
        size = len(x) // N_MICROBATCHES
        return x[:size] if broken else x[i * size : (i + 1) * size]

    def train_step(stage, inputs, targets):
        micro = [slice_input(inputs, i) for i in range(N_MICROBATCHES)]
        result = gpipe(stage, micro, targets.tensor_split(N_MICROBATCHES))
        return None if result is None else (result[0], torch.cat(result[1]))

    check(train_step, world)


@entry(
    "pp-stage-grad-missing",
    "class of hand-written pipelines",
    check="check_pipeline",
    cause="received without requires_grad",
)
def receives_activations_without_requires_grad(broken, world):
    """Received activations do not require gradients, so the last stage sends zeros back."""

    def train_step(stage, inputs, targets):
        parts = inputs.tensor_split(N_MICROBATCHES), targets.tensor_split(N_MICROBATCHES)
        result = gpipe(stage, *parts, requires_grad=not broken)
        return None if result is None else (result[0], torch.cat(result[1]))

    check(train_step, world)


class StageRuntime:
    """A stage in the style of PipeDream: it steps after every backward pass, and stashes weights."""

    def __init__(self, stage, broken):
        self.stage, self.broken = stage, broken
        self.optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        self.in_flight = {}

    def weights(self):
        return {name: p.detach().clone().requires_grad_() for name, p in self.stage.named_parameters()}

    def run_forward(self, i, x):
        weights = self.weights()
        output = torch.func.functional_call(self.stage, weights, (x,))
        self.in_flight[i] = x, weights
        return output.detach()

    def run_backward(self, i, backward):
        """Recompute micro-batch i, call ``backward`` with the output, and step."""
        x, weights = self.in_flight.pop(i)
        if self.broken:
            weights = self.weights()  # those of now
        backward(torch.func.functional_call(self.stage, weights, (x,)))
        for name, parameter in self.stage.named_parameters():
            parameter.grad = weights[name].grad
        self.optimizer.step()


@entry(
    "pp-weight-version",
    "PipeDream #22",
    check="check_pipedream",
    cause="backward passes run at the latest weights, forward passes do not: keep for each micro-batch the weights of",
)
def recomputes_with_newer_weights(broken, world):
    """Backward passes recompute a micro-batch in flight with weights that were updated after its forward pass."""
    count = 7

    def step(runtime, inputs, targets):
        if dist.get_rank() == 0:
            micro = inputs.tensor_split(count)
            dist.send(runtime.run_forward(0, micro[0]), 1)
            for i in range(count):
                sending = dist.isend(runtime.run_forward(i + 1, micro[i + 1]), 1) if i + 1 < count else None
                grad = torch.empty(len(micro[i]), HIDDEN, dtype=torch.float64)
                dist.recv(grad, 1)
                runtime.run_backward(i, lambda output, grad=grad: output.backward(grad))
                if sending is not None:
                    sending.wait()
            return None
        for i, target in enumerate(targets.tensor_split(count)):
            received = recv_forward(len(target))
            runtime.run_forward(i, received)
            runtime.run_backward(i, lambda output, y=target: nn.functional.mse_loss(output, y).backward())
            dist.send(received.grad, 0)
        return torch.zeros(()), None

    def start(model):
        stage = stage_of(model)
        return stage, partial(step, StageRuntime(stage, broken))

    check_pipedream(
        start,
        make,
        nn.MSELoss(),
        sequences(2 * count)[0],
        world,
        world_size=2,
        n_microbatches=count,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )


@entry(
    "pp-shape-probe-takes-a-batch",
    "DeepSpeed #5729",
    check="check_pipeline",
    cause="outputs of the one 1 later in the data: .* as where one stage alone takes a batch to learn its shape",
)
def takes_a_batch_to_learn_the_shape(broken, world):
    """Take a micro-batch from the iterator of the first stage to learn the shape of activations, and lose it."""
    batches = sequences(6, 6, 6)

    def micro_batches():
        """Return the micro-batches, without an end, as the repeating loader of each stage."""
        parts = [[part.double().tensor_split(N_MICROBATCHES) for part in batch] for batch in batches]
        return cycle([pair for inputs, targets in parts for pair in zip(inputs, targets, strict=True)])

    def start(model):
        stage, batches_here = stage_of(model), micro_batches()
        if dist.get_rank() == 0:
            probe = next(batches_here)
            assert stage(probe[0]).shape[1] == HIDDEN
            if not broken:
                batches_here = chain([probe], batches_here)

        def train_batch(*_):
            inputs, targets = zip(*(next(batches_here) for _ in range(N_MICROBATCHES)), strict=True)
            result = gpipe(stage, inputs, targets)
            return None if result is None else (result[0], torch.cat(result[1]))

        return stage, train_batch

    check_pipeline(start, make, nn.MSELoss(), batches, world, world_size=2, n_microbatches=N_MICROBATCHES)
