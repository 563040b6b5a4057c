"""The checks that two ways to train end in the same place, and that the number of replicas does not matter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pdlcheck.checks.conditions import meet
from pdlcheck.checks.message import Place, case, failure, name_of, takes_world
from pdlcheck.checks.state import State, require_bits
from pdlcheck.checks.trajectories.causes import how_ranks_differ
from pdlcheck.checks.trajectories.ends import End, Train, ends_of, goal_of, require_gradients, require_near
from pdlcheck.checks.trajectories.precision import Precision, made_for, precision_of
from pdlcheck.errors import Inconclusive

__all__ = ["check_same_trajectory", "check_world_size_does_not_matter"]

_GLOBAL_BATCH = "not the gradient of the global batch; or do all world sizes take the same global batches?"


@takes_world
def check_same_trajectory(
    train: Train,
    reference: Train,
    make: Callable[[], nn.Module],
    world: Any,
    *,
    world_size: int = 2,
    steps: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Check that ``train`` leaves the same weights as ``reference``, on every rank.

    The check compares the weights after 1, 2, ..., ``steps`` steps. A weight has three tolerances: relative to the
    largest distance that a weight of its tensor moved, to the tensor's largest element, and to the largest distance
    that any weight moved.

    - float64: 1e-8, 1e-12 and 1e-12.
    - float32: 1e-3, 1e-6 and 1e-6.
    - float16: 2e-2, 1e-6 and 1e-4.
    - bfloat16: 1e-1, 1e-6 and 1e-3.

    A tensor that is farther off is also right if ``reference`` goes as far astray from starts that differ in the last
    bits of ``dtype``. This happens under Adam where a gradient is zero except for rounding. Ranks must hold the same
    weights wherever those of ``reference`` are the same.

    Args:
        train: called as ``train(model, steps)`` on every rank, with the same weights on all, in float64, which
            ``torch.autocast`` leaves in float64. An optimizer whose steps depend on the size of the gradients, as those
            of SGD do, reveals the most faults. The gradients that an optimizer of ``torch.optim`` is given are
            compared, too, because the steps of Adam hide a common factor.
        reference: called in the same way. If it makes parameters that the model did not have, it is also called with 0
            steps, for their values at the start.
        make: makes the plain model, outside of the ranks; ``train`` wraps it, or layers of it in their places.
        world: where the ranks run.
        world_size: number of replicas, of both.
        steps: 3 or more, because momentum shows from the second step on.
        seed: of the initial weights.
        dtype: the lowest precision in which one of them computes, adds up gradients or sends them. For a dtype other
            than float64 both are given float32 weights and need float32 data, and smaller faults pass.

    Raises:
        AssertionError: names the first step after which they differ, rank, tensor, index and the wrong tensors, and how
            much farther or less far these moved. It also names ranks that diverged.
        Inconclusive: the reference does not change the weights in all these steps, leaves NaN or inf in them, or moves
            them no farther than rounding does.

    Example:
        >>> import functools
        >>> from pdlcheck.primitives import train_local_sgd, train_synchronous
        >>> from pdlcheck.worlds import get_world
        >>> sgd, mse = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), nn.MSELoss()
        >>> data = torch.arange(8.0, dtype=torch.float64).view(8, 1) / 8, torch.ones(8, 1, dtype=torch.float64)
        >>> def local(model, steps):
        ...     train_local_sgd(model, mse, data, optimizer=sgd, epochs=steps, global_batch=4, sync_every=1)
        >>> def synchronous(model, steps):
        ...     train_synchronous(model, mse, data, optimizer=sgd, epochs=steps, global_batch=4)
        >>> check_same_trajectory(local, synchronous, lambda: nn.Linear(1, 1), get_world("sim"))
    """
    __tracebackhide__ = True
    if steps < 1:
        raise ValueError(f"check_same_trajectory compares after each step, it needs 1 step or more, got {steps}")
    precision = precision_of("check_same_trajectory", dtype)
    start, moved, goal = _model(make, seed, precision), False, None
    for taken in range(1, steps + 1):
        before = goal.given if goal is not None else ()
        goal = goal_of(reference, start, taken, world, world_size, precision)._replace(before=before)
        found = ends_of(train, start, taken, world, world_size)
        who = f"{name_of(train)}: after {taken} step(s)"
        facts = case(world, world_size, steps=taken, seed=seed, dtype=_unusual(dtype))
        again = partial(ends_of, train, start, taken, world, world_size, passes=True)
        for rank in range(world_size):
            here = f"{who} rank {rank}"
            moved |= require_near(here, found, rank, goal, otherwise=_left_over(taken), again=again, case=facts)
        states = [end.state for end in found]
        apart = how_ranks_differ(states, precision, goal.expected, learned=True)
        if apart is not None:
            same = f"those of {name_of(reference)} are the same on all"
            raise failure(f"{who} ranks hold other weights, {same}", ranks=apart, likely_cause=apart.cause, case=facts)
        if moved:  # a learning rate of 0 hides gradients, too, and only for a while
            require_gradients(who, found, goal, case=facts)
        for end in found:
            meet(end.met or {})
    if not moved:
        what = f"{name_of(reference)} holds the weights that it started with after {steps} step(s)"
        raise Inconclusive(f"{name_of(train)}: {what}, there is nothing to compare")


@takes_world
def check_world_size_does_not_matter(
    train: Train,
    make: Callable[[], nn.Module],
    world: Any,
    *,
    world_sizes: Sequence[int] = (1, 2, 4),
    steps: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> list[nn.Module]:
    """Check that any number of replicas ends with the weights of the first world size.

    The replicas of one world size must be equal bit for bit. A weight may be off as in :func:`check_same_trajectory`.
    If the first world size is 1, a fault that one rank has in the same way does not show; :func:`check_same_trajectory`
    with a plain reference detects it.

    Args:
        train: called as ``train(model, steps)`` on every rank, with the same weights on all; takes the same global
            batches on any number of ranks, each rank its share.
        make: makes the plain model, outside of the ranks.
        world: where the ranks run.
        world_sizes: numbers of replicas; the others are compared with the first.
        steps: number of steps.
        seed: of the initial weights.
        dtype: the lowest precision, as in :func:`check_same_trajectory`.

    Returns:
        The trained model of rank 0 for each world size.
    """
    __tracebackhide__ = True
    precision = precision_of("check_world_size_does_not_matter", dtype)
    start = _model(make, seed, precision)
    goal = goal_of(train, start, steps, world, world_sizes[0], precision)._replace(what=f"world_size {world_sizes[0]}")
    trained: list[State] = []
    for world_size in world_sizes:
        again = ends_of(train, start, steps, world, world_size) if trained else []
        ranks = again or [End(*both) for both in zip(goal.expected, goal.given, strict=True)]
        facts = case(world, world_size, steps=steps, seed=seed, dtype=_unusual(dtype))
        for rank, state in enumerate(end.state for end in ranks):
            for name in state:
                require_bits(
                    f"{name_of(train)}: replicas differ after {steps} step(s): rank {rank}",
                    name,
                    (state[name], ranks[0].state[name]),
                    "rank 0 holds",
                    Place(rank, step=steps),
                    case=facts,
                )
        trained.append(ranks[0].state)
        who = f"{name_of(train)}: after {steps} step(s) every rank of {world_size}"
        same = goal._replace(expected=[trained[0]] * world_size)
        if not require_near(who, ranks, 0, same, cause=_GLOBAL_BATCH, case=facts):
            first = f"{goal.what} holds the weights that it started with"
            raise Inconclusive(f"{who}: {first}, there is nothing to compare")
    return [_loaded(start, state) for state in trained]


def _unusual(dtype: torch.dtype) -> torch.dtype | None:
    return None if dtype == torch.float64 else dtype


def _left_over(taken: int) -> str | None:
    """Return a hint for a fault that appears only now, after the step before was right; None after the first step."""
    if taken == 1:
        return None
    return (
        f"all was right after {taken - 1} step(s): look at what a step leaves to the next, such as gradients that are "
        "not zeroed, the state of the optimizer, the schedule of the learning rate, the order of the data"
    )


def _model(make: Callable[[], nn.Module], seed: int, precision: Precision) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return made_for(precision, make)


def _loaded(start: nn.Module, state: State) -> nn.Module:
    model = copy.deepcopy(start)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            value = state.get(f"parameter {name!r}", state.get(f"buffer {name!r}"))
            assert value is not None  # the state comes from a copy of this model
            tensor.copy_(value)
    return model
