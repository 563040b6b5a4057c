"""Ranks tell one another what they hold and what went wrong, so that all go on or all raise the same."""

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
Row = tuple[str, str]  # the name of a tensor, and what must be the same of it


@dataclass(frozen=True)
class Exchange(Generic[T]):
    """The same on every rank.

    Args:
        values: of all ranks, in the order of the group; what a rank with an error gave is there too.
        errors: place in the group -> error, of the ranks that have one.
    """

    values: list[T]
    errors: dict[int, Exception]

    @property
    def first_error(self) -> Exception | None:
        """That of the first rank that has one."""
        return next(iter(self.errors.values()), None)


def exchange(
    value: T, error: Exception | None, group: dist.ProcessGroup | None, *, by_messages: bool = False
) -> Exchange[T]:
    """Tell the ranks of ``group`` a value and an error, if any; called by all of them. One all_gather of objects.

    Args:
        value: can be pickled.
        error: what is wrong on this rank. pdlcheck's own arrive as they are, TypeError, ValueError and MemoryError
            with their text, others, which may not survive the way to another process, as a RuntimeError that names
            their kind.
        group: ``None`` is this process alone, which sends nothing.
        by_messages: needs of a backend nothing but send and recv: all goes to the first rank, and back.
    """
    mine = value, None if error is None else _able_to_travel(error)
    everyone: list[Any] = [mine]
    if group is not None and dist.get_world_size(group) > 1 and by_messages:
        everyone = _gathered_by_messages(mine, group)
    elif group is not None and dist.get_world_size(group) > 1:
        everyone = [None] * dist.get_world_size(group)
        with torch.inference_mode(False):  # gloo puts what it gathers into tensors in a thread, which has no such mode
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
        if isinstance(error, kind):  # also where it is a subclass, whose arguments may be others
            return kind(str(error))
    return RuntimeError(str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}")


def raise_first(found: Exchange[Any], problem: Exception | None, who: Members, caller: str = "") -> None:
    """Raise on every rank the error of the first rank that has one, and say which; ``problem`` is this rank's own."""
    if found.first_error is not None:
        text = str(found.first_error)
        begin = "" if text.startswith(caller) else f"{caller}: "
        where = f" (on rank {who.at(min(found.errors))})" if len(found.errors) < who.world_size else ""
        raise type(found.first_error)(f"{begin}{text}{where}") from problem


def require_agreement(caller: str, who: Members, facts: Callable[[], Mapping[str, object]]) -> None:
    """Every rank of ``who.group`` must find its own arguments right, and the same as those of the others.

    Args:
        caller: whom an error names.
        who: the ranks that take part; each of them must call.
        facts: checks this rank's arguments, raising ValueError or TypeError, and returns by name what must be the
            same on every rank; the values can be pickled and compared. Whatever else it raises, as where a library
            cannot read an argument or memory runs out, the other ranks learn of it too and do not wait.

    Raises:
        TypeError, ValueError: on every rank the same, that of the first rank that raised; ValueError naming the first
            fact that two ranks have differently, and both values.
        MemoryError, RuntimeError: on every rank the same, where a rank raised something else.

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
    """The tensors of all ranks, by place in the group, must be the same in the same order."""
    first = rows[0]
    for place, theirs in enumerate(rows):
        for position in range(max(len(first), len(theirs))):
            here, there = (" ".join(own[position]) if position < len(own) else "nothing" for own in (first, theirs))
            if here != there:
                raise ValueError(
                    f"{caller} needs the same model on every rank: tensor {position} is {here} on rank {who.at(0)}, "
                    f"{there} on rank {who.at(place)}; make it in the same way and order on all ranks"
                )
