"""Two ways to train end in the same place, and the number of replicas does not matter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.message import case, failure, first_index, name_of, show, takes_world
from pdlcheck.checks.state import State, require_bits, state_of
from pdlcheck.checks.trajectory_causes import (
    Precision,
    how_far,
    how_ranks_differ,
    likely_cause,
    made_for,
    precision_of,
    wants_another_dtype,
)
from pdlcheck.errors import Inconclusive

__all__ = ["check_same_trajectory", "check_world_size_does_not_matter"]

Train = Callable[[nn.Module, int], object]

_PART = "this rank holds a part of it; parts that are DTensors are compared whole"
_FLAT = "this rank holds a part of it in a flat tensor, as FSDP1 does; what fully_shard divides is compared whole"


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
    """``train`` must leave the weights that ``reference`` leaves, on every rank, after 1, 2, ..., ``steps``
    steps.

    A weight may be off by 1e-8 of the farthest way that a weight of its tensor went, and by 1e-12 of the tensor's
    largest element and of the farthest way that any weight went; with ``dtype=torch.float32`` by 1e-3 and 1e-6, with
    float16 by 2e-2 of the way, with bfloat16 by 1e-1 of it.

    Args:
        train, reference: called as ``train(model, steps)`` on every rank, with the same weights on all, in float64,
            which ``torch.autocast`` leaves in float64. An optimizer whose steps depend on the size of the
            gradients, as those of SGD do, shows the most.
        make: makes the plain model, outside of the ranks; ``train`` wraps it.
        world: where the ranks run.
        world_size: number of replicas, of both.
        steps: 3 or more, because momentum shows from the second step on.
        seed: of the initial weights.
        dtype: the lowest precision in which one of them computes, adds up gradients or sends them. With another one
            than float64 both are given float32 weights, as data are, and smaller faults pass.

    Raises:
        AssertionError: names the first step after which they differ, rank, tensor, index, the wrong tensors, and
            how much larger or smaller the way is that these went; and whether ranks went apart.
        Inconclusive: the reference does not change the weights, or leaves NaN or inf in them.

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
    start = _model(make, seed, precision)
    for taken in range(1, steps + 1):
        expected = world.run(_train, reference, start, taken, world_size=world_size)
        found = world.run(_train, train, start, taken, world_size=world_size)
        for rank in range(world_size):
            _require_near(
                f"{name_of(train)}: after {taken} step(s) rank {rank}",
                (state_of(start), found[rank], expected[rank]),
                f"{name_of(reference)} holds",
                precision,
                ranks=found,
                case=case(world, world_size, steps=taken, seed=seed, dtype=_unusual(dtype)),
            )


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
    """R replicas must end with the weights of the first world size, and bit for bit with the weights of
    each other.

    A weight may be off as in :func:`check_same_trajectory`. What is wrong in the same way on one rank does not show,
    where 1 is the first of the world sizes; :func:`check_same_trajectory` with a plain reference sees that.

    Args:
        train: called as ``train(model, steps)`` on every rank, with the same weights on all; takes the same
            global batches on any number of ranks, each rank its share.
        make, world, steps, seed, dtype: as in :func:`check_same_trajectory`.
        world_sizes: numbers of replicas; the first is what the others are compared with.

    Returns:
        The trained model of rank 0 for each world size.
    """
    __tracebackhide__ = True
    precision = precision_of("check_world_size_does_not_matter", dtype)
    start = _model(make, seed, precision)
    trained: list[State] = []
    for world_size in world_sizes:
        ranks = world.run(_train, train, start, steps, world_size=world_size)
        facts = case(world, world_size, steps=steps, seed=seed, dtype=_unusual(dtype))
        for rank, state in enumerate(ranks):
            for name in state:
                require_bits(
                    f"{name_of(train)}: replicas differ after {steps} step(s): rank {rank}",
                    name,
                    (state[name], ranks[0][name]),
                    "rank 0 holds",
                    case=facts,
                )
        trained.append(ranks[0])
        _require_near(
            f"{name_of(train)}: after {steps} step(s) every rank of {world_size}",
            (state_of(start), ranks[0], trained[0]),
            f"world_size {world_sizes[0]} holds",
            precision,
            likely_cause="not the gradient of the global batch; or do all world sizes take the same global batches?",
            case=facts,
        )
    return [_loaded(start, state) for state in trained]


def _unusual(dtype: torch.dtype) -> torch.dtype | None:
    return None if dtype == torch.float64 else dtype


def _model(make: Callable[[], nn.Module], seed: int, precision: Precision) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return made_for(precision, make)


def _train(train: Train, model: nn.Module, steps: int) -> State:
    torch.manual_seed(dist.get_rank() + 1)
    wide = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    try:
        train(model, steps)
    except RuntimeError as error:
        if wide and wants_another_dtype(error):
            error.add_note("the check gives float64 weights; give float64 data too, or pass dtype=torch.float32")
        raise
    return state_of(model)


def _require_near(
    who: str,
    states: tuple[State, State, State],
    what: str,
    precision: Precision,
    *,
    ranks: Sequence[State] = (),
    **details: object,
) -> None:
    """``ranks``: what all of them hold, of which ``states[1]`` is one."""
    __tracebackhide__ = True
    start, found, expected = states
    goals = {name: goal for name, goal in expected.items() if goal is not None and _is_a_number(goal)}
    begins = {name: _or_zeros(start.get(name), goal) for name, goal in goals.items()}
    farthest = max((_largest(goal - begins[name]) for name, goal in goals.items()), default=0.0)
    if not farthest:
        raise Inconclusive(f"{who}: {what} the weights that it started with, there is nothing to compare")
    wrong: list[tuple[str, Tensor, Tensor, Tensor]] = []
    for name, goal in goals.items():
        begin, end = begins[name], found.get(name)
        if not goal.isfinite().all():
            at = first_index(~goal.isfinite())
            raise Inconclusive(f"{who}: {what} {show(goal[at])} at {at} of {name}, there is nothing to compare with")
        if end is None:
            flat = any("_flat_param" in held for held in found)
            raise failure(f"{who} has no {name}, {what} one", likely_cause=_FLAT if flat else None, **details)
        if end.shape != goal.shape:
            shapes = f"{name} of shape {tuple(end.shape)}, {what} one of {tuple(goal.shape)}"
            raise failure(
                f"{who} holds {shapes}", likely_cause=_FLAT if end.dim() == 1 < goal.dim() else _PART, **details
            )
        way = goal - begin
        rounding = precision.of_the_weights * max(_largest(goal), _largest(begin), farthest)
        off = ~((end - goal).abs() <= precision.of_the_way * _largest(way) + rounding)
        if off.any():
            wrong.append((name, off, way, end - begin))
    if wrong:
        names, offs, ways, gone = zip(*wrong, strict=True)
        at = first_index(offs[0])
        held, right = found[names[0]], goals[names[0]]
        assert held is not None  # only gradients can be None
        way, went = (torch.cat([_flat(tensor) for tensor in tensors]) for tensors in (ways, gone))
        apart = how_ranks_differ(ranks, names[0], precision) if ranks else None
        causes = {"likely_cause": likely_cause(way, went, precision, len(ranks), apart)} | details
        raise failure(
            f"{who} holds {show(held[at])} at {at} of {names[0]}, {what} {show(right[at])}",
            wrong_tensors=f"{len(names)} of {len(goals)}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}",
            way=how_far(way, went),
            ranks=apart,
            **causes,
        )


def _is_a_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _or_zeros(begin: Tensor | None, goal: Tensor) -> Tensor:
    return torch.zeros_like(goal) if begin is None else begin


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _flat(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()


def _loaded(start: nn.Module, state: State) -> nn.Module:
    model = copy.deepcopy(start)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            value = state.get(f"parameter {name!r}", state.get(f"buffer {name!r}"))
            assert value is not None  # the state is that of a copy of this model
            tensor.copy_(value)
    return model
