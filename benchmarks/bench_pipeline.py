"""Our pipeline and the same schedule of torch.distributed.pipelining, step by step in turn, in one run.

Both have the same weights, data and stages on the same ranks; a row states the slowest rank's median step in the best
round. Then stages that sleep: their step is compared with ``(m + p - 1) * (3 T + c)`` for m micro-batches, p stages, T
seconds of a forward pass, 2 T of a backward pass; c is what everything else of a pair of passes costs, from steps with
half of T that take turns with them.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.bench import slowest_s
from pdlcheck.primitives import Pipeline
from pdlcheck.worlds import Ranks

WIDTH, SAMPLES, LAYERS = 512, 256, 8


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(LAYERS // 2) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def torch_step(schedule: str, layers: nn.Module, n_microbatches: int) -> Callable[[Tensor, Tensor], object]:
    """A step of torch's schedule."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stage = PipelineStage(layers, rank, last + 1, torch.device("cpu"))
    made = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](stage, n_microbatches, loss_fn=nn.MSELoss())

    def step(inputs: Tensor, targets: Tensor) -> object:
        given = (inputs,) if rank == 0 else ()
        return made.step(*given, **({"target": targets, "losses": []} if rank == last else {}))

    return step


def timed_pipelines(schedule: str, n_microbatches: int, steps: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of every step on this rank, and how far the gradients of the two are apart."""
    warnings.simplefilter("ignore")  # torch's own, about its internals
    pipeline = Pipeline(mlp(), nn.MSELoss(), schedule=schedule, n_microbatches=n_microbatches, split="layers")
    names = [f"{name}." for name in pipeline.stages[dist.get_rank()]]
    theirs = nn.Sequential(*(copy.deepcopy(pipeline.module.get_submodule(name[:-1])) for name in names))
    ways = {"ours": pipeline.step, "torch": torch_step(schedule, theirs, n_microbatches)}
    modules = {"ours": pipeline.module, "torch": theirs}
    torch.manual_seed(1)
    inputs, targets = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(steps + 2):
        for name in sorted(ways, reverse=bool(step % 2)):
            modules[name].zero_grad()
            dist.barrier()
            start = time.perf_counter()
            ways[name](inputs, targets)
            if step > 1:
                seconds[name].append(time.perf_counter() - start)
    pairs = zip(modules["ours"].parameters(), theirs.parameters(), strict=True)
    return seconds, max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs)  # type: ignore[operator, union-attr]


class Sleep(torch.autograd.Function):
    """Sleeps forwards, and twice as long backwards."""

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


def timed_sleepers(schedule: str, n_microbatches: int, stage_s: list[float], steps: int) -> dict[float, list[float]]:
    """Seconds of every step of stages that sleep, for each time of a forward pass, in turn."""
    x = torch.ones(n_microbatches, 1)
    pipelines = {
        seconds: Pipeline(
            nn.Sequential(*(Sleeper(seconds) for _ in range(dist.get_world_size()))),
            nn.MSELoss(),
            schedule=schedule,
            n_microbatches=n_microbatches,
        )
        for seconds in stage_s
    }
    taken: dict[float, list[float]] = {seconds: [] for seconds in stage_s}
    for step in range(steps + 1):
        for seconds, pipeline in pipelines.items():
            dist.barrier()
            start = time.perf_counter()
            pipeline.step(x, x)
            if step:
                taken[seconds].append(time.perf_counter() - start)
    return taken


@pytest.mark.benchmark(group="pipeline")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("n_microbatches", [4, 8], ids="{}microbatches".format)
def test_pipeline(benchmark: Any, ranks: Ranks, full: bool, schedule: str, n_microbatches: int) -> None:
    rounds: list[list[tuple[dict[str, list[float]], float]]] = []
    steps = 60 if full else 20
    benchmark.pedantic(
        lambda: rounds.append(ranks.run(timed_pipelines, schedule, n_microbatches, steps)), rounds=4 if full else 3
    )
    best = {
        name: min(slowest_s([seconds[name] for seconds, _ in everyone]) for everyone in rounds)
        for name in ("ours", "torch")
    }
    assert all(off < 1e-4 for everyone in rounds for _, off in everyone), "a fast wrong answer does not count"
    benchmark.extra_info |= {f"pipeline_{name}_s": seconds for name, seconds in best.items()}
    benchmark.extra_info |= {
        "schedule": schedule,
        "n_microbatches": n_microbatches,
        "world_size": ranks.world_size,
        "steps": steps,
    }
    benchmark.extra_info["row"] = (
        f"{schedule:>5}, {n_microbatches} micro-batches, {ranks.world_size} stages, ms a step: "
        f"Pipeline {best['ours'] * 1e3:.1f}, torch {best['torch'] * 1e3:.1f}, ratio {best['ours'] / best['torch']:.2f}"
    )


@pytest.mark.benchmark(group="bubble")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("n_microbatches", [4, 8], ids="{}microbatches".format)
def test_bubble_of_sleeping_stages(
    benchmark: Any, ranks: Ranks, full: bool, schedule: str, n_microbatches: int
) -> None:
    times_s, steps = [0.02, 0.01], 12 if full else 6
    everyone: list[dict[float, list[float]]] = []
    benchmark.pedantic(
        lambda: everyone.extend(ranks.run(timed_sleepers, schedule, n_microbatches, times_s, steps)), rounds=1
    )
    # the best step of the slowest rank: what other programs take from the cores is not the pipeline's
    measured_s, other_s = (min(map(max, zip(*(taken[t] for taken in everyone), strict=True))) for t in times_s)
    pairs = n_microbatches + ranks.world_size - 1
    overhead_s = other_s / pairs - 3 * times_s[1]
    model_s = pairs * (3 * times_s[0] + overhead_s)
    benchmark.extra_info |= {
        "schedule": schedule,
        "n_microbatches": n_microbatches,
        "world_size": ranks.world_size,
        "bubble_measured_s": measured_s,
        "bubble_model_s": model_s,
        "overhead_s": overhead_s,
    }
    benchmark.extra_info["row"] = (
        f"{schedule:>5}, {n_microbatches} micro-batches, {ranks.world_size} sleeping stages: {measured_s * 1e3:.1f} ms "
        f"a step, (m + p - 1)(3 T + c) {model_s * 1e3:.1f} with c = {overhead_s * 1e3:.2f} ms, "
        f"ratio {measured_s / model_s:.3f}"
    )
