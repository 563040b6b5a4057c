"""The spans and messages of a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["Message", "Run", "Span"]


class Span(NamedTuple):
    """One activity of a rank.

    Args:
        rank: the rank.
        kind: ``compute``; ``communication``, while the data of an operation moves; ``wait``, while the rank is
            blocked until an operation is complete. Communication runs in parallel with the other two.
        op: ``compute``, ``send``, ``recv``, ``all_reduce``, ...
        start_s: start in virtual seconds (steps without a topology).
        end_s: end in virtual seconds (steps without a topology); infinite if the rank waits for ever.
        what: a description of the operation.
        where: the user's source line.
        nbytes: bytes of the tensors that the rank passes in, or of the tensor of a receive.
    """

    rank: int
    kind: str
    op: str
    start_s: float
    end_s: float
    what: str
    where: str = ""
    nbytes: int = 0

    @property
    def never_ends(self) -> bool:
        """Return whether the rank waits for ever."""
        return self.end_s == math.inf


class Message(NamedTuple):
    """One message from ``src`` to ``dst``; ``what`` describes the send."""

    src: int
    dst: int
    start_s: float
    end_s: float
    nbytes: int
    what: str


class Run(Protocol):
    """The data that a picture is drawn from."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""

    @property
    def spans(self) -> Sequence[Span]:
        """Return the spans of all ranks."""

    @property
    def messages(self) -> Sequence[Message]:
        """Return the messages between ranks."""

    @property
    def in_steps(self) -> bool:
        """Return whether times count steps, because there was no topology."""

    @property
    def end(self) -> float:
        """Return the end of the run, in seconds or steps."""

    @property
    def overlap(self) -> float | None:
        """Return the share of the communication during which the same rank computes; None without communication."""

    @property
    def bubble(self) -> float:
        """Return the share of all ranks' time in which they neither compute nor communicate."""
