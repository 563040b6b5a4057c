"""What the ranks tell one another about a checkpoint, so that all go on or all raise the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pdlcheck.errors import CheckpointError
from pdlcheck.primitives.arguments import members

__all__ = ["Ranks", "ranks_of"]

_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group, or this process alone where there is no process group.

    Args:
        caller: the function that speaks in messages.
        rank: the place of this rank in the group.
        world_size: number of ranks.
        first: the global rank of the first one.
        group: ``None`` is the default group.
        alone: there is no process group.
    """

    caller: str
    rank: int
    world_size: int
    first: int
    group: dist.ProcessGroup | None
    alone: bool

    def all_gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        if self.alone:
            return [value]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on the first one; nothing elsewhere."""
        if self.alone:
            return [value]
        everyone: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, everyone, dst=self.first, group=self.group)
        return everyone or []

    def together(self, act: Callable[[], Any], *, on: int | None = None) -> list[Any]:
        """Call ``act``, which must not communicate, on every rank or on rank ``on``; its results, on every rank.

        Raises:
            Exception: the same on every rank, where ``act`` raised on any of them.
        """
        result, trouble = None, None
        try:
            result = act() if on in (None, self.rank) else None
        except Exception as error:
            fields = error.fields if isinstance(error, CheckpointError) else {}
            kind = type(error).__name__
            known = kind in _KINDS or isinstance(error, CheckpointError)
            trouble = (kind, str(error) if known else f"{kind}: {error}", fields)
        everyone = self.all_gather((result, trouble))
        self._raise([trouble for _, trouble in everyone])
        return [result for result, _ in everyone]

    def _raise(self, troubles: list[tuple[str, str, dict[str, Any]] | None]) -> None:
        found = [(rank, trouble) for rank, trouble in enumerate(troubles) if trouble is not None]
        if not found:
            return
        first, (kind, text, fields) = found[0]
        if len(found) < self.world_size or len({text for _, (_, text, _) in found}) > 1:
            text = f"{text} (on rank {', '.join(str(rank) for rank, _ in found)} of {self.world_size}"
            text += ", here in the words of the first)" if len(found) > 1 else ")"
        if kind in _KINDS:
            raise _KINDS[kind](f"{self.caller}: {text}")
        fields = {"path": None, "reason": text, "previous": None, **fields, "rank": first}
        raise CheckpointError(f"{self.caller}: {text}", **fields)


def ranks_of(caller: str, group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of ``group``; this process alone without a process group."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Ranks(caller, 0, 1, 0, None, True)
    who = members(caller, group)
    return Ranks(caller, who.rank, who.world_size, who.at(0), group, False)
