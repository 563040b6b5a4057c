"""The cause of a training that goes wrong on another number of ranks than have saved."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdlcheck.checks.checkpoint.runs import (
    OF_NO_FUNCTION,
    STEPS,
    Plan,
    Start,
    Trace,
    fresh_start,
    straight_run,
    with_what_was_left,
)
from pdlcheck.checks.checkpoint.unsaved_state import NUMBERS, first_difference
from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.tolerances import Tolerance

__all__ = ["cause_in_error", "cause_in_parts", "cause_in_weights", "in_words"]

Traces = tuple[Sequence[Trace], Sequence[Trace], Sequence[Trace]]  # resumed, its own run without a stop, the saving run

_SIZES = re.compile(r"torch\.Size\(\[([\d, ]*)\]\)|\(([\d, ]+)\)|\[([\d, ]+)\]")
_NEAR = 1e-3  # relative; two runs without a stop round apart by less


def cause_in_error(error: Exception, plan: Plan, saved: int, world_size: int) -> Diagnosis:
    """Return why ranks of another number cannot load what has been saved."""
    passes = f"on {in_words(saved)} it passes"
    folder = Path(plan.file)
    written = sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())
    asked = getattr(error, "filename", None)
    missing = Path(asked) if isinstance(asked, str) else None
    name = missing.name if missing is not None else ""
    listed = f"{', '.join(written[:4])}{', ...' if len(written) > 4 else ''}"
    sizes = [math.prod(map(int, re.findall(r"\d+", "".join(found)))) for found in _SIZES.findall(str(error))]
    unread = missing is not None and missing.is_relative_to(folder) and bool(written) and not missing.exists()
    cut = len(sizes) > 1 and _are_as(sizes[:2], saved, world_size)
    on_others = f"{passes}; on {in_words(world_size)},"
    return explain(
        error,
        [
            Candidate(
                f"{on_others} one reads {name}, and {in_words(saved)} wrote {listed}: each rank reads the file of its "
                "own number only",
                holds=lambda _: unread,
                short="a file that no rank wrote",
            ),
            Candidate(
                f"{on_others} the error names sizes of {' and '.join(map(str, sizes[:2]))} elements, which are as "
                f"{world_size} to {saved}: load puts the shard of one of {in_words(saved)} in the place of that of one "
                f"of {world_size}",
                holds=lambda _: cut,
                short=f"a shard of {in_words(saved)}",
            ),
        ],
        hints=[Candidate.when(passes, True)],
    )


def cause_in_weights(start: Start, plan: Plan, world: Any, traces: Traces, rank: int, name: str) -> Diagnosis:
    """Return the cause of a tensor that is wrong right after loading."""
    resumed, own, straight = traces
    size, saved = len(own), len(straight)
    found, expected = resumed[rank].states[0].get(name), own[rank].states[0].get(name)
    passes = f"on {in_words(saved)} it passes; on {in_words(size)}, rank {rank} holds as {name}"
    right = next(_places(expected, straight, _near), None)
    of_right = "" if right is None else f", and should hold what rank {right[0]} held as {right[1]}"
    held = [place for place in _places(found, straight, _equal) if place != right]
    # A constant, such as a bias of zeros, is in many places and shows nothing.
    tells = found is not None and found.numel() > 1 and not torch.equal(found, found.flatten()[0].expand_as(found))

    def is_that_of_start(one: Tensor | None) -> bool:
        made = world.run(fresh_start, start, plan, world_size=size)[rank].get(name)
        return made is not None and _equal(one, made)

    in_place: list[Candidate[Tensor | None]] = [
        Candidate(
            f"{passes} what rank {other} of {saved} held as {label}{of_right}: the names or places in the file are "
            "those of one rank, or load counts them by another number of ranks",
            holds=lambda _: tells,
            short=f"what rank {other} held as {label}",
        )
        for other, label in held[:1]
    ]
    pair = [[trace.states[0].get(name) for trace in each] for each in (resumed, own)]
    padded: Candidate[Tensor | None] = Candidate(
        _padded(f"{passes} the right numbers in order", saved),
        holds=lambda _: not held and _in_order(*pair),
        short="padding in other places",
    )
    of_start = Candidate(
        f"{passes} what start made: load does not restore it there",
        holds=is_that_of_start,
        short="what start made",
    )
    return explain(
        found, [*in_place, padded], [of_start], hints=[Candidate.when(f"on {in_words(saved)} it passes", True)]
    )


def cause_in_parts(
    start: Start, plan: Plan, world: Any, traces: Traces, heals: Callable[[Any, list[str]], bool]
) -> tuple[Diagnosis, str | None]:
    """Return the state that the other ranks lack after loading, found by putting states back, and its differences.

    Args:
        start: makes the model and the functions of the training.
        plan: the steps, the file and the seed.
        world: where the ranks run.
        traces: of the resumed run, of a run of as many ranks without a stop, and of the ranks that have saved.
        heals: takes the states of each rank and the names of those to put back, and returns whether the training then
            goes on as without a stop.
    """
    size, saved = len(traces[1]), len(traces[2])
    resumed, own = with_what_was_left(start, plan, world, traces[0], traces[1])
    old = [one.left for one in world.run(straight_run, start, plan, False, True, world_size=saved)]
    left = [trace.left for trace in own]
    evidence = {}
    for part in left[0]:
        texts = (_difference(mine.left.get(part), own[rank].left.get(part), part) for rank, mine in enumerate(resumed))
        evidence[part] = next((text for text in texts if text), None)
    everything = [part for part, text in evidence.items() if text]
    suspects = [part for part in everything if part not in OF_NO_FUNCTION]
    held = [part for part in suspects if not part.startswith(NUMBERS)]
    tries = [held, suspects, everything, [*everything, STEPS]]
    lost = next((names for names in tries if names and heals(left, names)), [])
    for part in list(lost):
        fewer = [other for other in lost if other != part]
        if fewer and heals(left, fewer):
            lost = fewer
    passes = f"on {in_words(saved)} it passes"
    if not lost:
        return Diagnosis(
            excluded=("the weights alone", *(f"{part} alone" for part in suspects)), hints=(passes,)
        ), "; ".join(text for part in suspects if (text := evidence[part])) or None
    names = " and ".join(lost)
    told = (
        f"{passes}; on {in_words(size)}, load leaves wrong: {names}; put back from a run of {in_words(size)} without a "
        "stop, the training goes on as without a stop"
    )
    shown = [text for part in lost if (text := evidence.get(part))]
    details = [
        detail
        for part in lost
        for detail in _details(part, [one.left.get(part) for one in resumed], [one.get(part) for one in left], old)
    ]
    return Diagnosis(fits=(f"{told}{''.join(f'; {one}' for one in details[:1])}",)), "; ".join(shown) or None


def _details(part: str, found: Sequence[Any], expected: Sequence[Any], old: Sequence[Any]) -> Iterator[str]:
    """Yield what is measured about a state that load leaves wrong."""
    size, saved = len(expected), len(old)
    counts = [pair for pairs in map(_numbers, found, expected) for pair in pairs]
    if counts and all(one * saved == other * size and one for one, other in counts):
        yield (
            f"it counts {counts[0][0]}, and should count {counts[0][1]}, and {counts[0][0]} times {in_words(saved)} is "
            f"{counts[0][1]} times {size}: the position counts what one rank has taken"
        )
    shares = [(rank, one, old[rank].get(part)) for rank, one in enumerate(found) if rank < saved]
    kept = {rank for rank, one, share in shares if one is not None and not first_difference(one, share)}
    wrong = [rank for rank, one in enumerate(found) if _difference(one, expected[rank], part)]
    if wrong and kept.issuperset(wrong) and any(first_difference(one.get(part), old[0].get(part)) for one in old):
        first = wrong[0]
        yield f"rank {first} of {size} loads what rank {first} of {saved} held: its share is that of {in_words(saved)}"
    if _in_order(_leaves(found), _leaves(expected)):
        yield _padded("it holds the right numbers in order", saved)


def in_words(count: int) -> str:
    """Return a number of ranks in words."""
    return f"{count} rank{'s' if count > 1 else ''}"


def _are_as(sizes: Sequence[int], saved: int, world_size: int) -> bool:
    """Return whether two sizes are those of the shards of one tensor on these numbers of ranks, in any order."""
    least, most = sorted(sizes)
    return least > 0 and least * max(saved, world_size) == most * min(saved, world_size)


def _padded(head: str, saved: int) -> str:
    return f"{head}, with zeros in other places: the padding is that of {in_words(saved)}"


def _places(
    tensor: Tensor | None, traces: Sequence[Trace], same: Callable[[Tensor, Tensor], bool]
) -> Iterator[tuple[int, str]]:
    """Yield each rank and name under which the traces hold a tensor at the save."""
    for rank, trace in enumerate(traces):
        for name, held in trace.states[0].items():
            if tensor is not None and held is not None and same(tensor, held):
                yield rank, name


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and torch.equal(one, other)


def _near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(Tolerance.of(one.dtype).accepts(one, other).all())


def _in_order(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Return whether the ranks together hold the expected numbers in order, with zeros in other places."""
    both = []
    for tensors in (found, expected):
        flat = [one.reshape(-1) for one in tensors if one is not None]
        if not flat or len({one.dtype for one in flat}) > 1:
            return False
        both.append(torch.cat(flat))
    numbers = [one[one != 0] for one in both]
    least = min(len(one) for one in numbers)
    if len(numbers[0]) > len(numbers[1]) or least < 2:
        return False
    moved = len(both[0]) != len(both[1]) or not _near(*both)
    return moved and _close(numbers[0][:least], numbers[1][:least])


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=_NEAR, atol=_NEAR * float(other.abs().max()))


def _leaves(states: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of floats in the states of all ranks: the first of each rank, the second of each, and so on.

    A tensor that is the same on all ranks counts once.
    """
    ranks = [[one for one in _tensors(state) if one.is_floating_point() and one.dim()] for state in states]
    leaves: list[Tensor] = []
    for of_all in itertools.zip_longest(*ranks):
        held = [one for one in of_all if one is not None]
        leaves += held[:1] if len(held) > 1 and all(_equal(one, held[0]) for one in held[1:]) else held
    return leaves


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state.to_local() if hasattr(state, "to_local") else state
    elif isinstance(state, dict | list | tuple):
        for one in state.values() if isinstance(state, dict) else state:
            yield from _tensors(one)


def _numbers(found: Any, expected: Any) -> Iterator[tuple[int, int]]:
    """Yield each pair of whole numbers in the same place of two states that differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in expected:
            if key in found:
                yield from _numbers(found[key], expected[key])
    elif isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        for pair in zip(found, expected, strict=False):
            yield from _numbers(*pair)
    elif type(found) is type(expected) is int and found != expected:
        yield found, expected


def _difference(found: Any, expected: Any, part: str) -> str | None:
    """Return the first difference that rounding does not explain."""
    return first_difference(_snapped(found, expected), expected, part)


def _snapped(found: Any, expected: Any) -> Any:
    """Return ``found`` with each number that is the expected one except for rounding replaced by it."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return {key: _snapped(one, expected[key]) if key in expected else one for key, one in found.items()}
    if type(found) is type(expected) and isinstance(found, list | tuple) and len(found) == len(expected):
        return [_snapped(*pair) for pair in zip(found, expected, strict=True)]
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        one, other = (next(iter(_tensors(each))) for each in (found, expected))
        is_near = one.shape == other.shape and one.dtype == other.dtype and one.is_floating_point()
        return expected if is_near and (not one.numel() or _close(one, other)) else found
    if type(found) is type(expected) is float:
        return expected if math.isclose(found, expected, rel_tol=_NEAR) else found
    return found
