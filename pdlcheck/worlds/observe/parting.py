"""The place where ranks parted: the last collective that they shared, and the lines to which they went on.

Ranks that skip a call do not fail at once, as long as the calls fit. They are out of step: a line of one rank meets
another line of another rank. The report of the failure names the first collective of this kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations

from pdlcheck.operations.signature import Signature
from pdlcheck.operations.words import alike, who
from pdlcheck.worlds.observe.decisions import decisions_of, function_of, source_of

__all__ = ["OUT_OF_STEP", "Partings"]

OUT_OF_STEP = "out of step"  # the first words of a report that names an earlier collective
_WENT = "went on to "
_MEMORY = 64  # collectives of a group that ranks reached by different lines

_Signatures = Sequence[Signature]
_Frames = Mapping[int, Sequence[str]]  # rank -> the line of its call, and the line that called this function


class _Trail:
    """The collectives of one group: the last one, the last one that all ranks posted from one line, and those after."""

    def __init__(self) -> None:
        self.last: _Signatures = ()
        self.shared: _Signatures = ()
        self.apart: list[_Signatures] = []


class Partings:
    """The lines from which ranks have posted their latest collectives, by group."""

    def __init__(self) -> None:
        self._trails: dict[str, _Trail] = {}

    def met(self, signatures: _Signatures) -> None:
        """Record a complete collective."""
        first = signatures[0]
        where, caller = first.where, first.caller
        if not where:
            return  # an operation of the world itself
        trail = self._trails.get(first.group)
        if trail is None:
            trail = self._trails[first.group] = _Trail()
        trail.last = signatures
        for one in signatures:
            if one.where != where or one.caller != caller:
                if len(trail.apart) < _MEMORY:
                    trail.apart.append(signatures)
                return
        trail.shared = signatures
        if trail.apart:
            trail.apart = []

    def report(self, now: Mapping[int, Signature | None]) -> list[str]:
        """Return one or two lines about where ranks parted; none if the ranks are at one line, or nothing is known.

        Args:
            now: rank -> the operation that it waits in, or None if it has returned.
        """
        for one in now.values():
            if one is not None and not one.is_p2p and one.where:
                trail = self._trails.get(one.group) or _Trail()
                here = {rank: now[rank] for rank in one.members if rank in now and _is_known(now[rank])}
                if lines := _out_of_step(trail, here) or _at_call(one, trail.last, here):
                    return lines
        return []


def _at_call(call: Signature, last: _Signatures, now: Mapping[int, Signature | None]) -> list[str]:
    """Return the lines about ranks that part at ``call``, in which one of them waits."""
    live = {rank: _frames(one) for rank, one in now.items() if one is not None}
    if len({tuple(frames) for frames in live.values()}) + (len(live) < len(now)) < 2:
        return []
    words = {
        rank: _went(one) if one is None or (one.group, one.seq) == (call.group, call.seq) else f"is at {one.where}"
        for rank, one in now.items()
    }
    after = [f"after {_text(last)}, {_phrase(words, live)}"] if last else []
    before = {one.rank: _frames(one) for one in last}
    if (statement := _between(live, before)) or len(live) == len(now):
        return [*after, *statement]
    if statement := _condition(live, before):
        return [*after, *statement]
    return _loop(live, before)


def _out_of_step(trail: _Trail, now: Mapping[int, Signature | None]) -> list[str]:
    """Return the lines about ranks that have skipped a call: two ranks reached one line in two collectives."""
    met = [(signatures, {one.rank: _frames(one) for one in signatures}) for signatures in trail.apart]
    ends = {rank: _frames(one) for rank, one in now.items() if one is not None}
    paths = [frames for _, frames in met if _are_one_path(frames)]
    if len(ends) < 2 or _are_one_path(ends):
        paths.append(ends)
    crossing = [frames for frames in paths if any(_cross(frames, other) for other in paths)]
    before = trail.shared
    for signatures, frames in met:
        if any(frames is one for one in crossing):
            words = _phrase({one.rank: _went(one) for one in signatures}, frames)
            after = f"after {_text(before)}, " if before else ""
            statement = _between(frames, {one.rank: _frames(one) for one in before})
            return [f"{OUT_OF_STEP} since collective {signatures[0].seq}: {after}{words}", *statement]
        before = signatures
    return []


def _is_known(one: Signature | None) -> bool:
    return one is None or bool(one.where)  # an operation of the world itself has no line


def _frames(one: Signature) -> Sequence[str]:
    return [one.where, one.caller] if one.caller else [one.where]


def _cross(first: _Frames, second: _Frames) -> bool:
    """Return whether one rank is at a line in the first collective, and another rank at it in the second one alone."""
    return any(
        list(there) == list(second[s]) and first.get(s) != there and second.get(r) != second[s]
        for r, there in first.items()
        for s in second
        if r != s
    )


def _levels(frames: _Frames) -> Iterator[Mapping[int, str]]:
    """Yield the line of each rank in each function that all ranks have reached, if the lines differ."""
    functions = {rank: {function_of(where): where for where in reversed(seen)} for rank, seen in frames.items()}
    for where in next(iter(frames.values()), ()):
        function = function_of(where)
        if function is not None and all(function in known for known in functions.values()):
            lines = {rank: known[function] for rank, known in functions.items()}
            if len({*lines.values()}) > 1:
                yield lines


def _are_one_path(frames: _Frames) -> bool:
    """Return whether a rank can run through all lines of the ranks, one after the other, in one function.

    It cannot if two lines lie in two branches of a statement. It may not if each line has a condition of its own.
    """
    lines = next(_levels(frames), None)
    if lines is None:
        return False
    sides = [row for row in _sides(lines.values()).values() if "loop" not in row]
    return not any(
        any(row[i] and row[j] and row[i] != row[j] for row in sides)
        or (any(row[i] and not row[j] for row in sides) and any(row[j] and not row[i] for row in sides))
        for i, j in permutations(range(len({*lines.values()})), 2)
    )


def _sides(lines: Iterable[str]) -> dict[int, list[str | None]]:
    """Return the side of each line, None if it is outside, by the line of the statement, the outermost first."""
    known = [{one.line: one.side for one in decisions_of(where)} for where in sorted({*lines})]
    depths = {line: depth for sides in known for depth, line in enumerate(sides)}
    outermost_first = sorted(depths, key=lambda line: (depths[line], line))
    return {line: [sides.get(line) for sides in known] for line in outermost_first}


def _between(frames: _Frames, before: _Frames) -> list[str]:
    """Return a line about the outermost statement that decides which of the ranks' lines runs; none without one.

    All ranks have gone the same way at the conditions around their last call. But one of them may have left the loop.
    """
    for lines in _levels(frames):
        where = next(iter(lines.values()))
        function = function_of(where)
        known = [decisions_of(last) for seen in before.values() for last in seen if function_of(last) == function]
        parted = [line for line, sides in _sides(lines.values()).items() if len({*sides}) > 1]
        new = [line for line in parted if not any(one.line == line for old in known for one in old)]
        loops = [line for line in parted if any(one.line == line and one.is_loop for old in known for one in old)]
        if line := next(iter([*new, *loops]), 0):
            return [f"{_at(where, line)} decides between these lines: {source_of(where, line)}"]
    return []


def _condition(frames: _Frames, before: _Frames) -> list[str]:
    """Return a line about the condition that took ranks beyond their last call, while other ranks returned."""
    for where, known in _beyond(frames, before):
        old = decisions_of(known) if known else []
        for one in decisions_of(where):
            if one not in old:
                return [f"{_at(where, one.line)} decides whether {where} runs: {source_of(where, one.line)}"]
    return []


def _loop(frames: _Frames, before: _Frames) -> list[str]:
    """Return a line about the loop in which ranks went on to a call that they have made before."""
    for where, known in _beyond(frames, before):
        loops = [one.line for one in decisions_of(where) if one.is_loop]
        if loops and known and _line(known) >= _line(where):
            ranks, loop = who([sorted(frames)]), _at(where, loops[-1])
            return [f"{ranks} went on in the loop at {loop}: {source_of(where, loops[-1])}"]
    return []


def _beyond(frames: _Frames, before: _Frames) -> Iterator[tuple[str, str]]:
    """Yield the lines that all ranks are at, each with the last line in the same function, which may be empty."""
    rank = min(frames)
    if all(list(one) == list(frames[rank]) for one in frames.values()):
        known = {function_of(where): where for where in before.get(rank, ())}
        for where in frames[rank]:
            yield where, known.get(function_of(where), "")


def _phrase(words: Mapping[int, str], frames: _Frames) -> str:
    """Return in words where ranks went; with the callers, if their lines are the same."""
    if len({seen[0] for seen in frames.values()}) < len({tuple(seen) for seen in frames.values()}):
        words = {
            rank: f"{said}, called at {frames[rank][1]}" if len(frames.get(rank, ())) > 1 else said
            for rank, said in words.items()
        }
    phrase = ", ".join(f"{who([ranks])} {said}" for said, ranks in alike(words).items())
    first, verb, rest = phrase.partition(_WENT)
    return first + verb + rest.replace(_WENT, "to ")


def _went(one: Signature | None) -> str:
    return "returned" if one is None else f"{_WENT}{one.where}"


def _text(signatures: _Signatures) -> str:
    """Return ``collective 3, all_reduce at train.py:41``."""
    first = signatures[0]
    group = "" if first.is_of_default_group else f" of the {first.group_text}"
    at = alike({one.rank: one.where for one in signatures})
    places = first.where if len(at) == 1 else ", ".join(f"{where} on {who([ranks])}" for where, ranks in at.items())
    return f"collective {first.seq}{group}, {first.op} at {places}"


def _at(where: str, line: int) -> str:
    return f"{where.rpartition(':')[0]}:{line}"


def _line(where: str) -> int:
    return int(where.rpartition(":")[2])
