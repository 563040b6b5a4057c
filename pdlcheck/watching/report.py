"""The error of ranks that differ: what differs, on which rank, since when, and the likely cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pdlcheck.errors import RanksDiffer
from pdlcheck.watching.causes import Evidence, likely_cause, ranks_of
from pdlcheck.watching.comparison import Difference
from pdlcheck.watching.replica_sets import Ranks

__all__ = ["apart_error", "difference_error"]


def difference_error(seen: Evidence) -> RanksDiffer:
    """Return the error of entries that differ. The first entry in the order of causes makes the headline."""
    first = _first(seen)
    counts = Counter(one.kind for one in seen.differences)
    return _error(
        f"{_when(seen.step)}: {_headline(first)}",
        seen,
        first.kind,
        first.name,
        first.odd[0],
        differ=", ".join(f"{kind} ({counts[kind]})" for kind in seen.kinds),
    )


def apart_error(
    name: str, values: Sequence[int], ranks: Ranks, sets: Sequence[Ranks], seen: Evidence
) -> RanksDiffer | None:
    """Return the error of ranks whose values are equal and must differ, or differ and must be equal; else None.

    Args:
        name: "data ids", or a random stream.
        values: the value of each rank; 0 if it has none.
        ranks: the global ranks, in the same order.
        sets: the sets of ranks that work on the same samples.
        seen: the step.
    """
    held = {rank: value for rank, value in zip(ranks, values, strict=True) if value}
    if name == "data ids":
        for one in sets:
            given = {rank: held[rank] for rank in one if rank in held}
            if len(set(given.values())) > 1:
                first, *rest = given
                odd = next(rank for rank in rest if given[rank] != given[first])
                text = f"{_when(seen.step)}: rank {odd} saw other samples than rank {first}"
                return _error(text, seen._replace(kinds=["other data"]), name, None, odd)
    alike = _alike(held, sets)
    if alike is None:
        return None
    kind = "same data" if name == "data ids" else "same stream"
    what = "saw the same samples in the same order" if name == "data ids" else f"draw the same random numbers ({name})"
    text = f"{_when(seen.step)}: {ranks_of(alike)} {what}"
    return _error(text, seen._replace(kinds=[kind]), name, None, alike[1])


def _alike(held: Mapping[int, int], sets: Sequence[Ranks]) -> list[int] | None:
    """Return the ranks of different sets that have the first value that occurs in more than one set."""
    set_of = {rank: number for number, one in enumerate(sets) for rank in one}
    holders: dict[int, list[int]] = {}
    for rank, value in held.items():
        holders.setdefault(value, []).append(rank)
    several = (ranks for ranks in holders.values() if len({set_of.get(rank, -1 - rank) for rank in ranks}) > 1)
    return next(several, None)


def _first(seen: Evidence) -> Difference:
    """Return the difference that the cause is about; the differences are never empty."""
    main = seen.main_kind
    return next((one for one in seen.differences if one.kind == main), seen.differences[0])


def _when(step: int) -> str:
    return f"after step {step}" if step else "before the first step"


def _headline(one: Difference) -> str:
    odd, other = one.odd[0], one.others[0]
    if one.same_text:
        verb = "has" if len(one.odd) == 1 else "have"
        return f"{ranks_of(one.odd)} {verb} another {one.name} than {ranks_of(one.others)}"
    found, expected = (one.texts[rank] or "nothing" for rank in (odd, other))
    return f"rank {odd} has {found} as {one.name}, rank {other} has {expected}"


def _error(headline: str, seen: Evidence, kind: str, tensor: str | None, rank: int, **lines: str) -> RanksDiffer:
    cause = likely_cause(seen)
    right = "never" if seen.right is None else _when(seen.right)
    details = {**lines, "last agreed": right, "likely cause": cause}
    width = max(map(len, details))
    text = "\n".join([f"pdlcheck.watch, {headline}", *(f"  {key:{width}}  {one}" for key, one in details.items())])
    return RanksDiffer(text, step=seen.step, kind=kind, tensor=tensor, rank=rank, cause=cause)
