"""What a rank does when its turn comes, as far as it concerns other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pdlcheck.worlds.watch import Signature

__all__ = ["Access", "Post", "Question", "StoreAccess"]


@dataclass(eq=False, slots=True)
class Post:
    """An operation is posted.

    Args:
        blocks_in_call: by a call that waits for it, so that no user code runs in between.
        kills: a fault kills the rank instead.
    """

    signature: Signature
    blocks_in_call: bool = False
    kills: bool = False


class Question(NamedTuple):
    """Asks whether an operation is complete."""

    signature: Signature


class StoreAccess(NamedTuple):
    """Reads or writes keys of the store; no keys at all: every key, as ``num_keys`` does."""

    keys: tuple[str, ...]
    writes: bool


Access = Post | Question | StoreAccess
