"""What the dumps of several ranks show: where they parted, and who waits for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pdlcheck.explanation.dumps import Dump, Entry
from pdlcheck.operations.words import who

__all__ = ["Story", "story_of"]


@dataclass(frozen=True)
class Story:
    """What the dumps show.

    Args:
        lines: the text.
        hangs: whether an operation waits for one that will not come.
    """

    lines: Sequence[str]
    hangs: bool


def story_of(dumps: Sequence[Dump]) -> Story:
    """Return what the dumps show, group by group."""
    groups = list(dict.fromkeys(entry.group for dump in dumps for entry in dump.entries))
    stories = [_of_group(group, dumps) for group in groups]
    lines = [line for story in stories for line in story.lines]
    messages = [one for dump in dumps for one in dump.entries if one.seq == 0 and one.state != "completed"]
    lines += [f"rank {one.rank}: {one.text} is not complete" for one in messages]
    known = {rank for dump in dumps for ranks in dump.groups.values() for rank in ranks}
    missing = sorted(known - {dump.rank for dump in dumps})
    if missing:
        lines.append(f"there is no dump of {who([missing])}: did it end before, or was its file not named?")
    if not lines:
        lines.append("the dumps hold no operation")
    return Story(lines, bool(messages) or any(story.hangs for story in stories))


def _of_group(group: str, dumps: Sequence[Dump]) -> Story:
    of_rank: dict[int, dict[int, Entry]] = {}
    members: set[int] = set()
    for dump in dumps:
        own = {entry.seq: entry for entry in dump.entries if entry.group == group and entry.seq}
        if own or (group == "the default group"):
            of_rank[dump.rank] = own
            members.add(dump.rank)
    seqs = sorted({seq for own in of_rank.values() for seq in own})
    if not seqs:
        return Story([], False)
    oldest = max(min(own) for own in of_rank.values() if own)  # the recorder keeps the last ones of each rank
    last_shared = 0
    for seq in (one for one in seqs if one >= oldest):
        found = {rank: own.get(seq) for rank, own in of_rank.items()}
        posted = {rank: entry for rank, entry in found.items() if entry is not None}
        kinds = {(entry.op, entry.shapes, entry.dtypes) for entry in posted.values()}
        absent = [rank for rank, entry in found.items() if entry is None]
        if len(kinds) == 1 and not absent and all(entry.state == "completed" for entry in posted.values()):
            last_shared = seq
            continue
        return Story(_parted(group, seq, last_shared, of_rank, posted, absent, len(kinds) > 1), True)
    return Story([f"{group}: all of {who([sorted(members)])} completed collective {last_shared}"], False)


def _parted(
    group: str,
    seq: int,
    last_shared: int,
    of_rank: dict[int, dict[int, Entry]],
    posted: dict[int, Entry],
    absent: Sequence[int],
    differ: bool,
) -> list[str]:
    if differ:
        head = f"{group}: ranks differ in collective {seq}"
    elif absent:
        head = f"{group}: {who([absent])} did not post collective {seq}, and {who([sorted(posted)])} {_wait(posted)}"
    else:
        head = f"{group}: {who([sorted(posted)])} posted collective {seq} alike, and it is not complete"
    by_text: defaultdict[str, list[int]] = defaultdict(list)
    for rank, entry in posted.items():
        by_text[f"{entry.text}, {entry.state}"].append(rank)
    for rank in absent:
        own = of_rank[rank]
        last = f"its last collective is {max(own)}, {own[max(own)].text}" if own else "it has posted none"
        by_text[last].append(rank)
    lines = [head, *(f"  {who([ranks])}: {text}" for text, ranks in by_text.items())]
    if last_shared:
        entries = [own[last_shared] for own in of_rank.values()]
        lines.append(f"  the last that all completed is collective {last_shared}, {entries[0].text}")
    if not differ and not absent:
        lines.append("  so the ranks agree: look at the network, at a rank that is stopped, or at the time limit")
    return lines


def _wait(posted: dict[int, Entry]) -> str:
    return "waits in it" if len(posted) == 1 else "wait in it"
