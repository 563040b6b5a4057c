"""Our pipeline and the same schedule of torch.distributed.pipelining, step by step in turn, in one run.

Both have the same weights, data and stages on the same ranks. A second benchmark has stages that sleep. Their step is
compared with ``(m + p - 1) * (3 T + c)`` for m micro-batches, p stages, T seconds of a forward pass and 2 T of a
backward pass. c is the remaining cost of a pair of passes; it is measured by steps with half of T that take turns with
the others.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdlcheck.primitives import Pipeline

pytestmark = pytest.mark.between_ranks

WIDTH, SAMPLES, LAYERS = 512, 256, 8
MICROBATCHES = [4, pytest.param(8, marks=pytest.mark.full)]
STAGE_S = 0.02  # T of the stages that sleep


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(LAYERS // 2) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def torch_step(
    schedule: str, layers: nn.Module, n_microbatches: int, rank: int, world_size: int, device: torch.device
) -> Callable[[Tensor, Tensor], object]:
    """Return a function that does one step of torch's schedule."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stage = PipelineStage(layers, rank, world_size, device)
    made = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](stage, n_microbatches, loss_fn=nn.MSELoss())

    def step(inputs: Tensor, targets: Tensor) -> object:
        given = (inputs,) if rank == 0 else ()
        return made.step(*given, **({"target": targets, "losses": []} if rank == world_size - 1 else {}))

    return step


@pytest.mark.benchmark(group="pipeline")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("n_microbatches", MICROBATCHES, ids="{}microbatches".format)
@pytest.mark.filterwarnings("ignore")  # torch's own warnings about its internals
def test_pipeline(
    rank_benchmark: Any, device: torch.device, rank: int, world_size: int, schedule: str, n_microbatches: int
) -> None:
    how = {"schedule": schedule, "n_microbatches": n_microbatches, "split": "layers"}
    pipeline = Pipeline(mlp().to(device), nn.MSELoss(), **how)
    names = [f"{name}." for name in pipeline.stages[rank]]
    theirs = nn.Sequential(*(copy.deepcopy(pipeline.module.get_submodule(name[:-1])) for name in names))
    steps = {
        "ours": pipeline.step,
        "torch": torch_step(schedule, theirs, n_microbatches, rank, world_size, device),
    }
    modules = {"ours": pipeline.module, "torch": theirs}
    torch.manual_seed(1)
    inputs, targets = (torch.randn(SAMPLES, WIDTH).to(device) for _ in range(2))

    def step(name: str) -> None:
        modules[name].zero_grad()
        steps[name](inputs, targets)

    rank_benchmark(lambda: step("ours"), against={"torch": lambda: step("torch")}, iterations=1)
    for a, b in zip(modules["ours"].parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad).abs().max() < 1e-4 * b.grad.abs().max(), "a fast wrong answer does not count"


class Sleep(torch.autograd.Function):
    """A function that sleeps forwards, and twice as long backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    """A stage that takes a known time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.weight, self.seconds)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.benchmark(group="bubble")
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.full)])
@pytest.mark.parametrize("n_microbatches", MICROBATCHES, ids="{}microbatches".format)
def test_bubble_of_sleeping_stages(
    rank_benchmark: Any, device: torch.device, world_size: int, schedule: str, n_microbatches: int
) -> None:
    x = torch.ones(n_microbatches, 1, device=device)

    def pipeline(seconds: float) -> Pipeline:
        stages = nn.Sequential(*(Sleeper(seconds) for _ in range(world_size))).to(device)
        return Pipeline(stages, nn.MSELoss(), schedule=schedule, n_microbatches=n_microbatches)

    whole, half = pipeline(STAGE_S), pipeline(STAGE_S / 2)
    others = {"half of T": lambda: half.step(x, x)}
    facts = {"stage_s": STAGE_S, "parts": [*others]}
    rank_benchmark(lambda: whole.step(x, x), against=others, iterations=1, facts=facts)
