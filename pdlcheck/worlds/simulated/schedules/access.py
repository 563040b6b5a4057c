"""What a rank does when its turn comes, as far as it concerns other ranks: the words of :mod:`.dependency`."""

from __future__ import annotations

from typing import NamedTuple

from pdlcheck.worlds.watch import Signature

__all__ = ["Access", "Post", "Question", "StoreAccess"]


class Post(NamedTuple):
    """An operation is posted."""

    signature: Signature


class Question(NamedTuple):
    """Asks whether an operation is complete."""

    signature: Signature


class StoreAccess(NamedTuple):
    """Reads or writes keys of the store; no keys at all: every key, as ``num_keys`` does."""

    keys: tuple[str, ...]
    writes: bool


Access = Post | Question | StoreAccess
