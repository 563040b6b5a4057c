"""The signature of one operation of one rank, and its text in reports.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["NEW_GROUP", "P2P", "Name", "Signature", "spans"]

P2P = frozenset({"send", "recv"})
NEW_GROUP = "new_group"
_DEFAULT_GROUP = "0"  # torch's name for the first group of a process


class Name(NamedTuple):
    """One of the user's names for a tensor.

    Args:
        text: the name, as a person would write it.
        function: the function that uses the name, ``train.py step``.
        where: the line that the function is executing, ``train.py:12``.
    """

    text: str
    function: str
    where: str


class Signature(NamedTuple):
    """One c10d operation of one rank, without its data; small, picklable and fast to create.

    Args:
        rank: global rank that posts it.
        op: the field's name: ``all_reduce``, ``send``, ...; for a new group with its ranks, ``new_group(0, 2)``.
        group: key of the process group.
        members: global ranks of the group, in group order.
        seq: number of this collective in the group, counted on this rank from 0; -1 for send and recv.
        shapes: shapes of the tensors that must agree between the ranks, or of the message.
        dtypes: dtypes of the same tensors.
        orders: order of their dimensions in memory, if that must agree, too; empty if all are contiguous.
        reduce_op: ``SUM``, ``MAX``, ...; empty without a reduction.
        root: global rank of the source or destination of a rooted collective, -1 without one.
        peer: global rank at the other end of a send or recv; -1 for a receive from any source.
        tag: tag of a send or recv.
        splits: number of elements to each member and from each member, for all_to_all.
        where: the user's source line, ``file.py:12``.
        names: the user's names for the first tensor.
        caller: the user's line that called the function of ``where``; empty if no user code did.
    """

    rank: int
    op: str
    group: str
    members: tuple[int, ...]
    seq: int = -1
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()
    reduce_op: str = ""
    root: int = -1
    peer: int = -1
    tag: int = 0
    splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    where: str = ""
    names: tuple[Name, ...] = ()
    caller: str = ""

    @property
    def is_p2p(self) -> bool:
        """Return whether the operation is a send or a receive."""
        return self.op in P2P

    @property
    def is_new_group(self) -> bool:
        """Return whether the operation makes a group."""
        return self.op.startswith(NEW_GROUP)

    @property
    def makes_group_of_itself(self) -> bool:
        """Return whether the rank makes a group of which it is the only member."""
        return self.op == f"{NEW_GROUP}({self.rank})"

    @property
    def numel(self) -> int:
        """Return the number of elements of all tensors together."""
        total = 0
        for shape in self.shapes:
            size = 1
            for extent in shape:
                size *= extent
            total += size
        return total

    def __str__(self) -> str:
        """Return ``all_reduce(SUM) of float32 (3,), default group (ranks 0-3), collective 2, at train.py:12``."""
        text = self._call()
        if self.op == "send":
            text += f" to rank {self.peer}"
        elif self.op == "recv":
            text += f" from rank {self.peer}" if self.peer >= 0 else " from any rank"
        if self.tag:
            text += f" tag {self.tag}"
        if self.root >= 0:
            text += f" root {self.root}"
        if self.shapes:
            text += " of " + self._tensors()
        if not self.is_new_group:
            text += f", {self.group_text}"
            if self.seq >= 0:
                text += f", collective {self.seq}"
        return text + (f", at {self.where}" if self.where else "")

    @property
    def kind(self) -> str:
        """Return ``all_reduce(SUM) of float32 (3,)`` and the like."""
        return self._call() + (f" of {self._tensors()}" if self.shapes else "")

    def _call(self) -> str:
        return self.op + (f"({self.reduce_op})" if self.reduce_op else "")

    @property
    def group_text(self) -> str:
        """Return ``default group``, or the name of another group, with the ranks."""
        name = "default group" if self.is_of_default_group else f"group {self._group_name}"
        return f"{name} (ranks {spans(self.members)})"

    @property
    def is_of_default_group(self) -> bool:
        """Return whether the group is the default group."""
        return self._group_name in ("", _DEFAULT_GROUP)

    @property
    def _group_name(self) -> str:
        return self.group.partition("@")[0]

    def _tensors(self) -> str:
        parts = [f"{dtype} {shape}" for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        return ", ".join(parts) if len(parts) <= 4 else f"{', '.join(parts[:3])} ... {len(parts)} tensors"


def spans(ranks: Sequence[int]) -> str:
    """Return ranks in the given order, with runs of three or more shortened.

    Example:
        >>> spans((0, 1, 2, 3)), spans((0, 1)), spans((4, 5, 6, 2))
        ('0-3', '0, 1', '4-6, 2')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
