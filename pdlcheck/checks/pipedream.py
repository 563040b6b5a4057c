"""PipeDream leaves the weights of its rule, which a sequential simulation follows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from pdlcheck.checks.message import case, name_of, takes_world
from pdlcheck.checks.pipeline_steps import (
    Batch,
    Loss,
    Named,
    Start,
    Taken,
    in_float64,
    is_near,
    require_all_held,
    require_near,
    train,
)
from pdlcheck.checks.state import made_by
from pdlcheck.errors import Inconclusive

__all__ = ["check_pipedream"]


@takes_world
def check_pipedream(
    start: Start,
    make: Callable[[], nn.Sequential],
    loss: Loss,
    batch: Batch,
    world: Any,
    *,
    world_size: int,
    n_microbatches: int,
    optimizer: Callable[[list[Tensor]], Optimizer],
    vertical_sync: bool = False,
    seed: int = 0,
) -> None:
    """One call of ``step`` must leave the weights of PipeDream's rule, simulated one micro-batch after the other.

    Stage s of n computes micro-batch i, forwards and backwards, with weights that have had ``max(0, i - (n - s) + 1)``
    updates, with vertical sync ``max(0, i - n + 1)`` in every stage; the update goes to the latest weights.

    Args:
        start: as in :func:`check_pipeline`, but ``step`` also takes the steps of the optimizers, one after each
            backward pass. What rank r holds is stage r.
        make: makes a sequential model.
        loss: mean over a micro-batch.
        batch: cut by ``tensor_split`` into ``n_microbatches``; take more than twice as many as ranks.
        world, world_size, seed: as in :func:`check_pipeline`.
        n_microbatches: updates that every stage takes.
        optimizer: makes the optimizer of a stage, for the simulation.
        vertical_sync: as above.

    Raises:
        AssertionError: names rank, tensor, index, and which other rule gives what was found.
        Inconclusive: another rule gives the same weights, so that nothing would be seen.

    Source: D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP (2019).
    """
    __tracebackhide__ = True
    inputs, targets = in_float64(batch[0]), in_float64(batch[1])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = made_by(make).double()
    everyone: list[list[Taken]] = world.run(train, start, model, [(inputs, targets)], None, world_size=world_size)
    stages = [sorted(ranks[0].weights) for ranks in everyone]
    parts = list(zip(inputs.tensor_split(n_microbatches), targets.tensor_split(n_microbatches), strict=True))
    who, facts = name_of(start), case(world, world_size, n_microbatches=n_microbatches, vertical_sync=vertical_sync)
    require_all_held(who, [ranks[0] for ranks in everyone], model, facts)

    def simulated(version: Callable[[int, int], int], scale: float = 1.0) -> Named:
        return _simulate(model, stages, loss, parts, optimizer, version, scale)

    n = world_size

    def stashed(i: int, s: int) -> int:
        return max(0, i - (n - s) + 1)

    def vertical(i: int, s: int) -> int:
        return max(0, i - n + 1)

    rules: dict[str, Callable[[], Named]] = {
        "weights are stashed, without vertical sync": lambda: simulated(stashed),
        "all stages use the version of stage 0: vertical sync": lambda: simulated(vertical),
        "every micro-batch waits for the one before: there is no pipeline": lambda: simulated(lambda i, s: i),
        "weights are those of the start for all micro-batches": lambda: simulated(lambda i, s: 0),
        "versions are one update too old": lambda: simulated(lambda i, s: max(0, stashed(i, s) - 1)),
        f"gradients are divided by n_microbatches = {n_microbatches}": lambda: simulated(stashed, 1 / n_microbatches),
    }
    expected = rules.pop(list(rules)[1 if vertical_sync else 0])()
    others = {text: rule() for text, rule in rules.items()}
    for text, other in others.items():
        if all(is_near(other[name], goal) for name, goal in expected.items()):
            raise Inconclusive(f"{who}: no fault would show, {text!r} gives the same weights; take more micro-batches")
    all_found = {name: found for (one,) in everyone for name, found in one.weights.items()}
    for rank, (one,) in enumerate(everyone):
        for name, found in one.weights.items():
            cause = next(
                (text for text, other in others.items() if all(is_near(all_found[n], other[n]) for n in other)), None
            )
            require_near(
                f"{who}: rank {rank} ends",
                f"parameter {name!r}",
                found,
                expected[name],
                likely_cause=cause
                or "forward and backward pass of a micro-batch used different weights, or updates are missing",
                case=facts,
            )


def _simulate(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    loss: Loss,
    parts: Sequence[Batch],
    optimizer: Callable[[list[Tensor]], Optimizer],
    version: Callable[[int, int], int],
    scale: float,
) -> Named:
    """The weights after all micro-batches, each with the version of the weights that ``version(i, stage)`` names."""
    latest = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    model = copy.deepcopy(model)  # functional_call leaves other tensors in a layer that stands in it twice
    steps = [optimizer([latest[name] for name in names]) for names in stages]
    history = [{name: p.detach().clone() for name, p in latest.items()}]
    for i, (inputs, targets) in enumerate(parts):
        used = {
            name: history[version(i, stage)][name].clone().requires_grad_()
            for stage, names in enumerate(stages)
            for name in names
        }
        value = loss(functional_call(model, used, (inputs,)), targets) * scale
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name, weight in used.items():
            latest[name].grad = weight.grad
        for one in steps:
            one.step()
        history.append({name: p.detach().clone() for name, p in latest.items()})
    return history[-1]
