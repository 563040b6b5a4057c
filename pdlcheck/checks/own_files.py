"""Whether two ranks write one file, found by giving each rank a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pdlcheck.checks.message import failure

__all__ = ["require_own_files"]


def require_own_files(
    who: str, save_under: Callable[[Path], object], world: Any, folder: Path, *, world_size: int, case: str
) -> None:
    """No name may be written by two ranks: a rank that reads meanwhile, or a kill, meets half of the file.

    Args:
        who: whose files they are, in the message.
        save_under: called on every rank with a path that no other rank has; may communicate.
        world: where the ranks run.
        folder: an empty one.
        world_size: number of ranks.
        case: in the message.

    Raises:
        AssertionError: names the file and the ranks. Files that stay empty, such as locks, do not count; neither does
            anything where the ranks need one folder, and do not come to an end with one each.
    """
    __tracebackhide__ = True
    folders = [folder / f"rank-{rank}" for rank in range(world_size)]
    for own in folders:
        own.mkdir(parents=True)
    try:
        world.run(_save, save_under, folders, world_size=world_size)
    except Exception:  # such as a rank that lists what the others have written
        return
    writers: dict[str, list[int]] = {}
    for rank, own in enumerate(folders):
        for path in sorted(own.rglob("*")):
            if path.is_file() and path.stat().st_size:
                writers.setdefault(str(path.relative_to(own)), []).append(rank)
    for name, ranks in writers.items():
        if len(ranks) > 1:
            raise failure(
                f"{who}: ranks {', '.join(map(str, ranks))} all write the file {name}",
                likely_cause="saving is not left to one rank, or the rank is not in the name: the last one to write "
                "wins, and a rank that reads meanwhile, or a kill, meets half of it",
                case=case,
            )


def _save(save_under: Callable[[Path], object], folders: list[Path]) -> None:
    save_under(folders[dist.get_rank()])
