"""The counts of what one rank of a program has done: optimizer steps, operations, bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from pdlcheck.operations.posted import take_posted
from pdlcheck.operations.signature import Signature
from pdlcheck.scripts.saved import Saved
from pdlcheck.worlds.journal import note

__all__ = ["PROGRESS", "Counts", "counted", "listen"]

PROGRESS = "progress"  # the kind of a note in the journal
_PAUSE_S = 0.2
_listeners: list[Callable[[int, int, int], object]] = []


@dataclass
class Counts:
    """What one rank has done.

    Args:
        rank: the rank.
        steps: the calls of ``step`` of all optimizers.
        collectives, messages: the operations that the rank has posted; a message is a send or a receive.
        nbytes: the bytes of the tensors of these operations, on this rank.
        joined: whether the rank has joined a process group.
        saved: the tensors that it has saved, if they are compared.
    """

    rank: int
    steps: int = 0
    collectives: int = 0
    messages: int = 0
    nbytes: int = 0
    joined: bool = False
    saved: Saved = field(default_factory=dict)
    _told_at: float = 0.0

    def record(self) -> dict[str, int]:
        """Return the counts as JSON has them."""
        return {name: getattr(self, name) for name in ("rank", "steps", "collectives", "messages", "nbytes")}

    def append(self, signature: Signature) -> None:
        """Count an operation; see ``operations/posted.py``."""
        self.joined = True
        if signature.is_new_group:
            return
        if signature.is_p2p:
            self.messages += 1
        else:
            self.collectives += 1
        for dtype in dict.fromkeys(signature.dtypes):
            size = getattr(getattr(torch, dtype.removeprefix("torch."), None), "itemsize", 0)
            self.nbytes += size * signature.numel
        self.tell()

    def step(self) -> None:
        """Count a step of an optimizer."""
        self.steps += 1
        self.tell()

    def tell(self) -> None:
        """Report the progress of this rank, a few times a second."""
        now = time.monotonic()
        if now - self._told_at > _PAUSE_S:
            self._told_at = now
            operations = self.collectives + self.messages
            for listener in _listeners:
                listener(self.rank, self.steps, operations)
            note(PROGRESS, [self.steps, operations])


@contextmanager
def listen(listener: Callable[[int, int, int], object]) -> Iterator[None]:
    """Call ``listener(rank, steps, operations)`` with the progress of ranks that are threads of this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def counted(rank: int) -> Iterator[Counts]:
    """Count what this rank does during the block."""
    counts, own_thread = Counts(rank), threading.get_ident()

    def stepped(*_: Any) -> None:
        if threading.get_ident() == own_thread:  # hooks are those of all simulated ranks
            counts.step()

    hook = register_optimizer_step_post_hook(stepped)
    try:
        with take_posted(rank, counts):
            yield counts
    finally:
        hook.remove()
