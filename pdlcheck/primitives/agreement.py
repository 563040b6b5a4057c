"""Agreement between ranks: exchange values and errors, so that all ranks go on or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from pdlcheck.errors import PdlcheckError
from pdlcheck.primitives.arguments import Members

__all__ = ["Exchange", "Row", "exchange", "raise_first", "require_agreement", "require_same_rows"]

T = TypeVar("T")
Row = tuple[str, str]  # the name of a tensor, and its properties that must be the same on every rank


@dataclass(frozen=True)
class Exchange(Generic[T]):
    """The result of :func:`exchange`, the same on every rank.

    Args:
        values: the values of all ranks, in the order of the group, including those of ranks with an error.
        errors: the errors, by the place in the group of the rank that has one.
    """

    values: list[T]
    errors: dict[int, Exception]

    @property
    def first_error(self) -> Exception | None:
        """Return the error of the first rank that has one, or ``None``."""
        return next(iter(self.errors.values()), None)


def exchange(
    value: T, error: Exception | None, group: dist.ProcessGroup | None, *, by_messages: bool = False
) -> Exchange[T]:
    """Send this rank's value and error to every rank of ``group``. Every rank must call it.

    The cost is one all_gather of objects.

    Args:
        value: any object that can be pickled.
        error: the problem of this rank, or ``None``. Errors of pdlcheck arrive unchanged. TypeError, ValueError and
            MemoryError arrive with their text. Any other error may not survive pickling; it arrives as a RuntimeError
            that names its type.
        group: the process group; ``None`` stands for this process alone, and nothing is sent.
        by_messages: use only send and recv of the backend: all values go to the first rank of the group, and back.
    """
    mine = value, None if error is None else _able_to_travel(error)
    everyone: list[Any] = [mine]
    if group is not None and dist.get_world_size(group) > 1 and by_messages:
        everyone = _gathered_by_messages(mine, group)
    elif group is not None and dist.get_world_size(group) > 1:
        everyone = [None] * dist.get_world_size(group)
        with torch.inference_mode(False):  # gloo fills the gathered tensors in a thread outside inference mode
            dist.all_gather_object(everyone, mine, group=group)
    errors = {place: found for place, (_, found) in enumerate(everyone) if found is not None}
    return Exchange([one for one, _ in everyone], errors)


def _gathered_by_messages(mine: object, group: dist.ProcessGroup) -> list[Any]:
    first, *others = dist.get_process_group_ranks(group)
    found: list[Any] = [None]
    if dist.get_rank() != first:
        dist.send_object_list([mine], first, group)
        dist.recv_object_list(found, first, group)
        return list(found[0])
    everyone = [mine]
    for rank in others:
        dist.recv_object_list(found, rank, group)
        everyone.append(found[0])
    for rank in others:
        dist.send_object_list([everyone], rank, group)
    return everyone


def _able_to_travel(error: Exception) -> Exception:
    if isinstance(error, PdlcheckError):
        return error
    for kind in (TypeError, ValueError, MemoryError):
        if isinstance(error, kind):  # a subclass loses its type, because its constructor may take other arguments
            return kind(str(error))
    return RuntimeError(str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}")


def raise_first(found: Exchange[Any], problem: Exception | None, who: Members, caller: str = "") -> None:
    """Raise the error of the first rank that has one, on every rank; name that rank if not every rank has an error.

    Return without an error if no rank has one.

    Args:
        found: the result of :func:`exchange`.
        problem: the error of this rank, or ``None``; it becomes the cause of the raised error.
        who: the ranks that exchanged.
        caller: the name to begin the text with, unless the text begins with it already.
    """
    if found.first_error is not None:
        text = str(found.first_error)
        begin = "" if text.startswith(caller) else f"{caller}: "
        where = f" (on rank {who.at(min(found.errors))})" if len(found.errors) < who.world_size else ""
        raise type(found.first_error)(f"{begin}{text}{where}") from problem


def require_agreement(caller: str, who: Members, facts: Callable[[], Mapping[str, object]]) -> None:
    """Raise on every rank of ``who.group`` if a rank's arguments are wrong or differ from those of another rank.

    Args:
        caller: the name of the calling function, for the error text.
        who: the ranks that take part; each of them must call.
        facts: checks this rank's arguments and raises ValueError or TypeError. It returns, by name, the values that
            must be the same on every rank; they can be pickled and compared. If it raises anything else, for example
            because a library cannot read an argument or memory runs out, the other ranks raise too instead of waiting.

    Raises:
        TypeError, ValueError: the error of the first rank that raised, on every rank; or a ValueError that names the
            first fact in which two ranks differ, and both values.
        MemoryError, RuntimeError: a rank raised another error; the same error on every rank.

    Example:
        >>> from pdlcheck.primitives.arguments import members
        >>> def start():
        ...     try:
        ...         require_agreement("train", members("train", None), lambda: {"epochs": dist.get_rank() + 1})
        ...     except ValueError as error:
        ...         return str(error)
        >>> world.run(start, world_size=2)[0]
        'train needs the same epochs on every rank, got 1 on rank 0 and 2 on rank 1'
    """
    mine: dict[str, object] = {}
    problem: Exception | None = None
    try:
        mine = dict(facts())
    except Exception as error:
        problem = error
    found = exchange(mine, problem, who.group)
    raise_first(found, problem, who)
    first = found.values[0]
    for place, theirs in enumerate(found.values):
        for name, value in first.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"{caller} needs the same {name} on every rank, "
                    f"got {value} on rank {who.at(0)} and {theirs.get(name)} on rank {who.at(place)}"
                )


def require_same_rows(caller: str, rows: Sequence[Sequence[Row]], who: Members) -> None:
    """Raise ValueError if the ranks have different tensors, or the same ones in a different order.

    Args:
        caller: the name of the calling function, for the error text.
        rows: the tensors of each rank, by the rank's place in the group.
        who: the ranks of the group.
    """
    first = rows[0]
    for place, theirs in enumerate(rows):
        for position in range(max(len(first), len(theirs))):
            here, there = (" ".join(own[position]) if position < len(own) else "nothing" for own in (first, theirs))
            if here != there:
                raise ValueError(
                    f"{caller} needs the same model on every rank: tensor {position} is {here} on rank {who.at(0)}, "
                    f"{there} on rank {who.at(place)}; make it in the same way and order on all ranks"
                )
