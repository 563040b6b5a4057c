"""What ranks record with ``record_property``: told once where they agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdlcheck.harness.reporting.agreed import agreed

__all__ = ["Properties", "record"]


def record(item: pytest.Item, values: Sequence[Sequence[Any]]) -> None:
    """Add the pairs of a name and a value of every rank to those of the item."""
    item.user_properties += [(f"{name}{which}", value) for which, (name, value) in agreed(values)]


class Properties:
    """On a simulated rank: what it has recorded in the present phase of the item."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self.pairs: list[tuple[str, object]] = []
        self.arrive()

    def arrive(self) -> None:
        self._everybodys, self._item.user_properties = self._item.user_properties, self.pairs

    def leave(self) -> None:
        self.pairs, self._item.user_properties = self._item.user_properties, self._everybodys

    def take(self) -> list[tuple[str, object]]:
        """What is to be told of the phase that has ended."""
        pairs, self.pairs = self.pairs, []
        return pairs
