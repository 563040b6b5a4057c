"""The report of a deadlock: a line for each rank, and the wait cycle if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdlcheck.errors import Deadlock
from pdlcheck.operations.signature import Signature
from pdlcheck.operations.words import in_common, who
from pdlcheck.worlds.observe.differences import describe_differences
from pdlcheck.worlds.observe.parting import OUT_OF_STEP

__all__ = ["deadlock"]


def deadlock(
    waiting: Mapping[int, Signature | str],
    ended: Mapping[int, Signature | None],
    missing: Mapping[int, Sequence[int]],
    parted: Sequence[str] = (),
) -> Deadlock:
    """Return the error for ranks that all wait.

    Args:
        waiting: rank -> the operation it is blocked in, or a description of another kind of wait.
        ended: rank -> its last operation, or None, for the ranks that have returned.
        missing: rank -> the ranks that its operation still needs.
        parted: lines about where the ranks parted, as :meth:`Matcher.parted` returns them.
    """
    words: dict[int, str] = {}
    known = describe_differences(each for each in (*waiting.values(), *ended.values()) if isinstance(each, Signature))
    for rank in sorted({*waiting, *ended}):
        if rank in ended:
            last = f"; last operation {known[rank]}" if ended[rank] is not None else " without an operation"
            words[rank] = f"has returned{last}"
            continue
        needs = [other for other in missing.get(rank, ()) if other != rank]
        wanted = f"; waits for {who([needs])}" if needs else ""
        words[rank] = f"blocked in {known.get(rank, waiting[rank])}{wanted}"
    cycle = _cycle(missing)
    head = f"no rank can go on: {len(waiting)} of {len(waiting) + len(ended)} are blocked"
    tail = [f"wait cycle: {' -> '.join(f'rank {r}' for r in [*cycle, cycle[0]])}"] if cycle else []
    gone = [r for needs in missing.values() for r in needs if r in ended]
    if gone and not cycle and not any(line.startswith(OUT_OF_STEP) for line in parted):
        tail.append(
            f"rank {gone[0]} has returned and will not take part: fewer steps, or an early return, on that rank"
        )
    if any(_needs_outsiders(signature, missing.get(rank, ())) for rank, signature in waiting.items()):
        tail.append(
            "new_group is for all ranks to call, also for those that are not in the group; "
            "with use_local_synchronization=True for its members alone"
        )
    lines = [f"rank {rank}: {said}" for rank, said in words.items()]
    return Deadlock("\n  ".join([head, *in_common(words), *tail, *parted]), ranks=lines, cycle=cycle)


def _needs_outsiders(operation: Signature | str, needs: Sequence[int]) -> bool:
    """Return whether the operation makes a group and waits for a rank that is not a member of it."""
    if not isinstance(operation, Signature) or not operation.is_new_group:
        return False
    members = operation.op[operation.op.index("(") + 1 : -1].split(", ")
    return any(str(rank) not in members for rank in needs)


def _cycle(missing: Mapping[int, Sequence[int]]) -> list[int]:
    """Return a shortest cycle of ranks that wait for one another; empty if the wait ends at a rank that has gone."""
    best: list[int] = []
    for start in missing:
        paths = [[start]]
        seen = {start}
        while paths and not (best and len(paths[0]) >= len(best)):
            path = paths.pop(0)
            for rank in missing.get(path[-1], ()):
                if rank == start and len(path) > 1 and (not best or len(path) < len(best)):
                    best = path
                elif rank in missing and rank not in seen:
                    seen.add(rank)
                    paths.append([*path, rank])
    return best
