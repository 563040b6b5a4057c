"""The exchange between ranks about a checkpoint, so that all ranks go on or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pdlcheck.errors import CheckpointError
from pdlcheck.primitives.agreement import exchange
from pdlcheck.primitives.arguments import members

__all__ = ["Ranks", "ranks_of"]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group, or this process alone if there is no process group.

    Args:
        caller: the name of the calling function, for messages.
        rank: the place of this rank in the group.
        world_size: number of ranks.
        first: the global rank of the first one.
        group: ``None`` is this process alone.
    """

    caller: str
    rank: int
    world_size: int
    first: int
    group: dist.ProcessGroup | None

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank on the first one; an empty list on the others."""
        if self.group is None:
            return [value]
        everyone: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        # gather_object pads every message to the longest one. The first rank's value is the longest, because it holds
        # everything that the ranks have in common. So the first rank keeps its value and sends None.
        dist.gather_object(value if self.rank else None, everyone, dst=self.first, group=self.group)
        return [value, *everyone[1:]] if everyone else []

    def together(self, act: Callable[[], Any], *, on: int | None = None) -> list[Any]:
        """Call ``act``, which must not communicate, on every rank or on rank ``on``; return the results on every rank.

        Raises:
            Exception: ``act`` raised on any rank; the same error on every rank.
        """
        result, problem = None, None
        try:
            result = act() if on in (None, self.rank) else None
        except Exception as error:
            problem = error
        found = exchange(result, problem, self.group)
        if found.first_error is not None:
            self._raise(found.errors)
        return found.values

    def _raise(self, errors: dict[int, Exception]) -> None:
        rank, first = next(iter(errors.items()))
        text = str(first)
        if len(errors) < self.world_size or len(set(map(str, errors.values()))) > 1:
            text = f"{text} (on rank {', '.join(map(str, errors))} of {self.world_size}"
            text += ", here in the words of the first)" if len(errors) > 1 else ")"
        if not text.startswith(self.caller):
            text = f"{self.caller}: {text}"
        if isinstance(first, TypeError | ValueError):
            raise type(first)(text)
        fields = first.fields if isinstance(first, CheckpointError) else {}
        raise CheckpointError(text, **{"path": None, "reason": str(first), "previous": None, **fields, "rank": rank})


def ranks_of(caller: str, group: dist.ProcessGroup | None) -> Ranks:
    """Return the ranks of ``group``; this process alone without a process group."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Ranks(caller, 0, 1, 0, None)
    who = members(caller, group)
    return Ranks(caller, who.rank, who.world_size, who.at(0), who.group)
