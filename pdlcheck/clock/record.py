"""The spans and messages that a timeline is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["Message", "Run", "Span"]


class Span(NamedTuple):
    """What a rank did for a while.

    Args:
        kind: ``compute``; ``communication``, while the data of an operation moves; ``wait``, while the rank stands
            still until an operation is complete. Communication goes on beside the other two.
        op: ``compute``, ``send``, ``recv``, ``all_reduce``, ...
        start_s, end_s: virtual seconds (steps without a topology); an infinite end: the rank waits for ever.
        what: the operation in words.
        where: the user's source line.
        nbytes: of the tensors that the rank gives, or takes in a receive.
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
        return self.end_s == math.inf


class Message(NamedTuple):
    """One message on its way from ``src`` to ``dst``; ``what`` is the send in words."""

    src: int
    dst: int
    start_s: float
    end_s: float
    nbytes: int
    what: str


class Run(Protocol):
    """What a picture is drawn from."""

    @property
    def world_size(self) -> int: ...
    @property
    def spans(self) -> Sequence[Span]: ...
    @property
    def messages(self) -> Sequence[Message]: ...
    @property
    def in_steps(self) -> bool: ...
    @property
    def end(self) -> float: ...
    @property
    def overlap(self) -> float | None: ...
    @property
    def bubble(self) -> float: ...
