"""The accesses of ranks: the acts of a rank that concern other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pdlcheck.worlds.observe import Signature

__all__ = ["Access", "Post", "Question", "StoreAccess"]


@dataclass(eq=False, slots=True)
class Post:
    """The post of an operation.

    Args:
        signature: describes the operation.
        blocks_in_call: the call that posts the operation also waits for it, so no user code runs in between.
        kills: a fault kills the rank instead.
    """

    signature: Signature
    blocks_in_call: bool = False
    kills: bool = False


class Question(NamedTuple):
    """A poll: the rank asks whether an operation is complete."""

    signature: Signature


class StoreAccess(NamedTuple):
    """A read or write of keys of the store. No keys at all mean every key, as for ``num_keys``."""

    keys: tuple[str, ...]
    writes: bool


Access = Post | Question | StoreAccess
