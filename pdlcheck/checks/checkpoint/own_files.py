"""The check that no two ranks write one file: each rank saves into a folder of its own."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from pdlcheck.checks.checkpoint.unsaved_state import first_difference
from pdlcheck.checks.message import failure

__all__ = ["require_own_files"]


def require_own_files(
    who: str, save_under: Callable[[Path], object], world: Any, folder: Path, *, world_size: int, case: str
) -> None:
    """Check that no two ranks write a file of the same name.

    Otherwise a rank that reads at the same time, or a kill, may find half of the file. Ranks may rename equal files to
    one name, if each rank writes under a temporary name of its own.

    Args:
        who: the subject, for the message.
        save_under: called on every rank with a path that no other rank has; may communicate.
        world: where the ranks run.
        folder: an empty folder.
        world_size: number of ranks.
        case: the case, for the message.

    Raises:
        AssertionError: two ranks write one file. The message names the file and the ranks. Files that stay empty, such
            as locks, do not count. Nothing is raised if the ranks need a common folder and fail with separate ones.
    """
    __tracebackhide__ = True
    folders = [folder / f"rank-{rank}" for rank in range(world_size)]
    for own in folders:
        own.mkdir(parents=True)
    try:
        renamed: list[dict[str, str]] = world.run(_save, save_under, folders, world_size=world_size)
    except Exception:  # for example, a rank lists the files of the others
        return
    writers: dict[str, list[int]] = {}
    for rank, own in enumerate(folders):
        for path in sorted(own.rglob("*")):
            if path.is_file() and path.stat().st_size:
                writers.setdefault(str(path.relative_to(own)), []).append(rank)
    for name, ranks in writers.items():
        if len(ranks) < 2:
            continue
        before = [_name_before(name, renamed[rank]) for rank in ranks]
        listed = ", ".join(map(str, ranks))
        half = "a rank that reads meanwhile, or a kill, meets half of it"
        if None in before:
            raise failure(
                f"{who}: ranks {listed} all write the file {name}",
                likely_cause="saving is not left to one rank, or the rank is not in the name: the last one to write "
                f"wins, and {half}",
                case=case,
            )
        if len(set(before)) < len(before):
            raise failure(
                f"{who}: ranks {listed} all write the file {before[0]}, which becomes {name}",
                likely_cause="the rank is not in the temporary name: one rank renames what another is writing",
                case=case,
            )
        if not all(_same(folders[ranks[0]] / name, folders[rank] / name) for rank in ranks):
            raise failure(
                f"{who}: ranks {listed} all give a file of theirs the name {name}, and not the same one",
                likely_cause="saving is not left to one rank, or the rank is not in the name: the last one wins, and "
                "what the others saved is lost",
                case=case,
            )


class Renames:
    """A record of the files that this process renames while at least one of its ranks asks for it.

    The class replaces ``os.rename`` and ``os.replace`` in every module, because a module may have imported them by
    name. An audit hook would see more renames. But it cannot be removed, and it slows down the rest of the process.
    """

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._renamed: list[tuple[str, str]] = []
        self._exchanged: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> list[tuple[str, str]]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._renamed = []
                self._exchange({real: functools.partial(self._record, real) for real in (os.rename, os.replace)})
            return self._renamed

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            while self._exchanged and not self._users:
                names, name, real = self._exchanged.pop()
                names[name] = real

    def _exchange(self, ours: dict[Any, Callable[..., None]]) -> None:
        for module in list(sys.modules.values()):
            names = vars(module) if issubclass(type(module), ModuleType) else {}
            for name, value in list(names.items()):
                if type(value) is BuiltinFunctionType and value in ours:
                    names[name] = ours[value]
                    self._exchanged.append((names, name, value))

    def _record(self, real: Callable[..., None], src: Any, dst: Any, **keywords: Any) -> None:
        real(src, dst, **keywords)
        self._renamed.append((os.path.abspath(os.fsdecode(src)), os.path.abspath(os.fsdecode(dst))))


_RENAMES = Renames()


def _save(save_under: Callable[[Path], object], folders: list[Path]) -> dict[str, str]:
    """Save on this rank, and return the files that it renamed into its folder: new name to old name."""
    own = os.path.abspath(folders[dist.get_rank()])
    with _RENAMES as renamed:
        save_under(folders[dist.get_rank()])
        mine = [pair for pair in renamed if pair[1].startswith(own + os.sep)]
    return {os.path.relpath(dst, own): os.path.relpath(src, own) for src, dst in mine}


def _name_before(name: str, renamed: dict[str, str]) -> str | None:
    """Return the name under which a file was written; None if it was written under its final name."""
    for path in (Path(name), *Path(name).parents):
        if str(path) in renamed:
            return str(renamed[str(path)] / Path(name).relative_to(path))
    return None


def _same(one: Path, other: Path) -> bool:
    """Return whether two files are equal byte for byte, or ``torch.load`` returns equal tensors from them.

    The bytes may differ for equal tensors, because ``torch.save`` writes the file's name into the file.
    """
    if one.read_bytes() == other.read_bytes():
        return True
    try:
        found, expected = (torch.load(path, weights_only=True, map_location="cpu") for path in (one, other))
    except Exception:  # not a file of torch.save, or one with other objects than tensors
        return False
    return first_difference(found, expected) is None
