"""Two ways to train end in the same place, and the number of replicas does not matter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.message import case, failure, first_index, name_of, show
from pdlcheck.checks.state import State, require_bits, state_of
from pdlcheck.errors import Inconclusive

__all__ = ["check_same_trajectory", "check_world_size_does_not_matter"]

Train = Callable[[nn.Module, int], object]

# float64 steps lose about 1e-16 of a weight each, and training magnifies that; a step with a wrong gradient
# is off by 1e-3 of the way that the weights went and more.
RELATIVE = 1e-8


def check_same_trajectory(
    train: Train,
    reference: Train,
    make: Callable[[], nn.Module],
    world: Any,
    *,
    world_size: int = 2,
    steps: int = 4,
    seed: int = 0,
) -> None:
    """``train`` must leave the weights that ``reference`` leaves, on every rank, after 1, 2, ..., ``steps``
    steps.

    A weight may be off by 1e-8 of the farthest way that a weight of its tensor went, or of its largest
    element.

    Args:
        train, reference: called as ``train(model, steps)`` on every rank, with the same float64 weights on
            all.
        make: makes the model.
        world: where the ranks run.
        world_size: number of replicas, of both.
        steps: 3 or more, because momentum shows from the second step on.
        seed: of the initial weights.

    Raises:
        AssertionError: names the first step after which they differ, rank, tensor, index, the wrong tensors, and
            how much larger or smaller the way is that these went.
        Inconclusive: the reference does not change the weights.

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
    start = _model(make, seed)
    for taken in range(1, steps + 1):
        expected = world.run(_train, reference, start, taken, world_size=world_size)
        found = world.run(_train, train, start, taken, world_size=world_size)
        for rank in range(world_size):
            _require_near(
                f"{name_of(train)}: after {taken} step(s) rank {rank}",
                (state_of(start), found[rank], expected[rank]),
                f"{name_of(reference)} holds",
                case=case(world, world_size, steps=taken, seed=seed),
            )


def check_world_size_does_not_matter(
    train: Train,
    make: Callable[[], nn.Module],
    world: Any,
    *,
    world_sizes: Sequence[int] = (1, 2, 4),
    steps: int = 3,
    seed: int = 0,
) -> list[nn.Module]:
    """R replicas must end with the weights of the first world size, and bit for bit with the weights of
    each other.

    A weight may be off as in :func:`check_same_trajectory`.

    Args:
        train: called as ``train(model, steps)`` on every rank, with the same float64 weights on all.
        make, world, steps, seed: as in :func:`check_same_trajectory`.
        world_sizes: numbers of replicas; the first is what the others are compared with.

    Returns:
        The trained model of rank 0 for each world size.
    """
    __tracebackhide__ = True
    start = _model(make, seed)
    trained: list[State] = []
    for world_size in world_sizes:
        ranks = world.run(_train, train, start, steps, world_size=world_size)
        facts = case(world, world_size, steps=steps, seed=seed)
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
            case=facts,
        )
    return [_loaded(start, state) for state in trained]


def _model(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


def _train(train: Train, model: nn.Module, steps: int) -> State:
    torch.manual_seed(dist.get_rank() + 1)
    train(model, steps)
    return state_of(model)


def _require_near(who: str, states: tuple[State, State, State], what: str, **details: object) -> None:
    __tracebackhide__ = True
    start, found, expected = states
    compared, moved = 0, False
    wrong: list[tuple[str, Tensor, Tensor, Tensor]] = []
    for name, goal in expected.items():
        begin, end = start[name], found[name]
        assert begin is not None and end is not None and goal is not None  # only gradients can be None
        if not goal.is_floating_point():
            continue
        way = goal - begin
        compared, moved = compared + 1, moved or bool(way.any())
        scale = max((float(t.abs().max()) for t in (way, goal, begin) if t.numel()), default=0.0)
        off = ~((end - goal).abs() <= RELATIVE * scale)
        if off.any():
            wrong.append((name, off, way, end - begin))
    if not moved:
        raise Inconclusive(f"{who}: {what} the weights that it started with, there is nothing to compare")
    if wrong:
        names, offs, ways, gone = zip(*wrong, strict=True)
        at = first_index(offs[0])
        held, goal = found[names[0]], expected[names[0]]
        assert held is not None and goal is not None
        raise failure(
            f"{who} holds {show(held[at])} at {at} of {names[0]}, {what} {show(goal[at])}",
            wrong_tensors=f"{len(names)} of {compared}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}",
            way=_how_far(torch.cat([way.flatten() for way in ways]), torch.cat([way.flatten() for way in gone])),
            **details,
        )


def _how_far(way: Tensor, went: Tensor) -> str | None:
    """The multiple of ``way`` that comes nearest to the way that the wrong tensors ``went``."""
    if not way.any():
        return None
    return f"they went {float(went.dot(way) / way.dot(way)):.6g} times as far in this direction"


def _loaded(start: nn.Module, state: State) -> nn.Module:
    model = copy.deepcopy(start)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            value = state.get(f"parameter {name!r}", state.get(f"buffer {name!r}"))
            assert value is not None  # the state is that of a copy of this model
            tensor.copy_(value)
    return model
