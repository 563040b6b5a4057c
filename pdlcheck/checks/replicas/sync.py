"""The checks that initial weights arrive on every rank, and that averages of models are right.

Every rank starts with other random numbers. So equal values after the call are equal because the code made them equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain, predictions
from pdlcheck.checks.message import Place, case, failure, first_index, name_of, show, takes_world
from pdlcheck.checks.rank_results import group_of
from pdlcheck.checks.state import State, digest, made_by, require_bits, scramble, state_of, tied_names
from pdlcheck.checks.tolerances import Tolerance
from pdlcheck.errors import Inconclusive

__all__ = ["check_average_parameters", "check_broadcast_parameters"]


@takes_world
def check_broadcast_parameters(
    broadcast: Callable[..., object],
    make: Callable[[], nn.Module],
    world: Any,
    *,
    world_size: int = 3,
    src: int = 0,
    ranks: Sequence[int] | None = None,
    seed: int = 0,
) -> None:
    """Check that every rank ends with exactly the parameters and buffers that ``src`` had.

    Tied tensors must still be tied.

    Args:
        broadcast: called as ``broadcast(model, src=global_rank)`` on every rank, on models whose parameters and buffers
            all differ; with ``group=group`` if ``ranks`` is given.
        make: makes the model.
        world: where the ranks run.
        world_size: number of ranks.
        src: the rank that sends; its position in ``ranks`` if that is given.
        ranks: global ranks of a group, in its order; their number then replaces ``world_size``.
        seed: rank r draws from ``seed + r``.

    Raises:
        AssertionError: names rank, tensor and index, and the likely cause.
        Inconclusive: the model has no parameter or buffer.
    """
    __tracebackhide__ = True
    models = _on_models(broadcast, make, world, world_size, ranks, seed, src=src if ranks is None else ranks[src])
    expected = models[src].before
    if not expected:
        raise Inconclusive(f"{name_of(broadcast)}: the model has no parameter or buffer, there is nothing to send")
    facts = case(world, len(models), src=src, group=None if ranks is None else list(ranks), seed=seed)
    for rank, model in enumerate(models):
        if model.tied_before != model.tied_after:
            raise failure(
                f"{name_of(broadcast)}: on rank {rank} the tied tensors are {model.tied_after}, "
                f"they were {model.tied_before}",
                likely_cause="a parameter was replaced; copy into it instead",
                case=facts,
            )
        for name, tensor in model.after.items():
            require_bits(
                f"{name_of(broadcast)}: rank {rank}",
                name,
                (tensor, expected[name]),
                f"rank {src} had",
                Place(rank),
                likely_cause=_why_not_sent(name, tensor, rank, src, models),
                case=facts,
            )


@takes_world
def check_average_parameters(
    average: Callable[..., object],
    make: Callable[[], nn.Module],
    world: Any,
    *,
    world_size: int = 3,
    buffers: bool = True,
    ranks: Sequence[int] | None = None,
    seed: int = 0,
) -> None:
    """Check that every rank ends with the mean over ranks of every parameter, the same on every rank to the last bit.

    The mean may be off by ``world_size * eps * sum(|x|)``, the bound for ``world_size`` terms in any order. Means of
    integer tensors are integers here, and must be exact.

    Args:
        average: called as ``average(model)`` on every rank; with ``group=group`` if ``ranks`` is given.
        make: makes the model, which is then filled with other values on every rank.
        world: where the ranks run.
        world_size: number of ranks.
        buffers: buffers must be averaged too; False does not examine them.
        ranks: global ranks of a group, in its order; their number then replaces ``world_size``.
        seed: rank r draws from ``seed + r``.

    Raises:
        AssertionError: names rank, tensor and index, and the likely cause.
        Inconclusive: the model has nothing to average: no parameters, and no buffers or ``buffers=False``.
    """
    __tracebackhide__ = True
    models = _on_models(average, make, world, world_size, ranks, seed)
    facts = case(world, len(models), group=None if ranks is None else list(ranks), seed=seed)
    names = [name for name in models[0].after if buffers or not name.startswith("buffer")]
    if not names:
        raise Inconclusive(
            f"{name_of(average)}: the model has no parameter{' or buffer' if buffers else ', buffers=False'}, there is "
            "nothing to average"
        )
    for name in names:
        given = torch.stack([_tensor(model.before, name).double() for model in models])
        mean = given.mean(0)
        for rank, model in enumerate(models):
            found = _tensor(model.after, name)
            exact = not found.is_floating_point()
            eps = 0.0 if exact else torch.finfo(found.dtype).eps
            bound = len(models) * eps * given.abs().sum(0)
            wrong = ~((found.double() - mean).abs() <= bound)
            if wrong.any():
                at = first_index(wrong)
                raise failure(
                    f"{name_of(average)}: rank {rank} holds {show(found[at])} at {at} of {name}, "
                    f"the mean over ranks is {show(mean[at])}",
                    Place(rank, name, at, found[at], mean[at]),
                    contributions=", ".join(f"rank {r}: {show(row[at])}" for r, row in enumerate(given)),
                    allowed="an exact mean of integers" if exact else f"{show(bound[at])} off",
                    likely_cause=_why_not_averaged(found, given, rank, wrong),
                    cure="buffers=False accepts what ranks keep by intention" if name.startswith("buffer") else None,
                    case=facts,
                )
            require_bits(
                f"{name_of(average)}: rank {rank}",
                name,
                (found, models[0].after[name]),
                "rank 0 holds",
                Place(rank),
                likely_cause="ranks add in different orders",
                case=facts,
            )


@dataclass(frozen=True)
class Model:
    """A model before and after a call on one rank."""

    before: State
    after: State
    tied_before: list[list[str]]
    tied_after: list[list[str]]


def _on_models(
    subject: Callable[..., object],
    make: Callable[[], nn.Module],
    world: Any,
    world_size: int,
    ranks: Sequence[int] | None,
    seed: int,
    **keywords: Any,
) -> list[Model]:
    if ranks is None:
        return list(world.run(_on_model, subject, make, None, seed, keywords, world_size=world_size))
    everyone = world.run(_on_model, subject, make, ranks, seed, keywords, world_size=max(ranks) + 2)
    return [everyone[rank] for rank in ranks]


def _on_model(
    subject: Callable[..., object],
    make: Callable[[], nn.Module],
    ranks: Sequence[int] | None,
    seed: int,
    keywords: dict[str, Any],
) -> Model | None:
    torch.manual_seed(seed + dist.get_rank())
    group = group_of(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    module = made_by(make)
    scramble(module, whole=dist.get_world_size(group))
    before, tied = state_of(module), tied_names(module)
    subject(module, **keywords, **({} if group is None else {"group": group}))
    if group is not None:
        dist.destroy_process_group(group)
    return Model(before, state_of(module), tied, tied_names(module))


def _tensor(state: State, name: str) -> Tensor:
    found = state[name]
    assert found is not None  # only gradients can be None
    return found


def _why_not_sent(name: str, found: Tensor | None, rank: int, src: int, models: list[Model]) -> Diagnosis:
    """Return which rank's tensor this one is."""

    def is_that_of(model: Model, held: State) -> bool:
        given = model.before[name]
        return given is not None and held[name] is not None and digest(held) == digest({name: given})

    kind, others = name.split()[0], [other for other in range(len(models)) if other not in (rank, src)]
    kept = f"it kept its own {kind}: it was left out of the broadcast"
    return explain(
        {name: found},
        [Candidate(kept, holds=partial(is_that_of, models[rank]))] if rank != src else [],
        [
            Candidate(f"it holds what rank {other} had: the wrong rank sent", holds=partial(is_that_of, models[other]))
            for other in others
        ],
    )


def _why_not_averaged(found: Tensor, given: Tensor, rank: int, wrong: Tensor) -> Diagnosis:
    """Return the mistakes that explain all wrong elements of a tensor; ``given`` has those of each rank, stacked."""
    eps = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
    return explain(
        found,
        predictions(_wrong_averages(given, rank)),
        tolerance=Tolerance(relative=max(1e-6, len(given) * eps)),
        expected=given.mean(0),
        wrong=wrong,
    )


def _wrong_averages(given: Tensor, rank: int) -> Iterator[tuple[str, Tensor]]:
    world_size, total = len(given), given.sum(0)
    yield "it kept its own value: it was not averaged", given[rank]
    yield "it is the sum: it was not divided by world_size", total
    yield "it was divided by world_size twice", total / world_size / world_size
    yield "it is the mean rounded to an integer", given.mean(0).trunc()
    for other in range(world_size):
        if other != rank:
            yield f"it is the value of rank {other}", given[other]
        yield f"the value of rank {other} is missing", (total - given[other]) / world_size
