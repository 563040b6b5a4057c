"""The meeting of the ranks before they make a group; it moves nothing, and no method of a group posts it."""

from __future__ import annotations

from pdlcheck.operations.kind import OperationKind
from pdlcheck.operations.method import Method

__all__ = ["MEET"]


class _NewGroup(OperationKind):
    """The meeting; its signature's op names the ranks, too."""

    name = "new_group"


MEET = Method("")
MEET.kind = _NewGroup()
