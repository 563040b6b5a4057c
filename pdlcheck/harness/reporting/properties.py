"""Values that ranks record with ``record_property``: shown once if all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdlcheck.harness.reporting.common_notes import agreed

__all__ = ["Properties", "record"]


def record(item: pytest.Item, values: Sequence[Sequence[Any]]) -> None:
    """Add the (name, value) pairs of every rank to those of the item."""
    item.user_properties += [(f"{name}{which}", value) for which, (name, value) in agreed(values)]


class Properties:
    """The values that a simulated rank has recorded in the current phase of the item."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self.pairs: list[tuple[str, object]] = []
        self.arrive()

    def arrive(self) -> None:
        """Make this rank's values those of the item, when the rank gets the turn."""
        self._everybodys, self._item.user_properties = self._item.user_properties, self.pairs

    def leave(self) -> None:
        """Restore the values of the item, when the rank passes the turn."""
        self.pairs, self._item.user_properties = self._item.user_properties, self._everybodys

    def take(self) -> list[tuple[str, object]]:
        """Return the values recorded in the phase that has ended, and forget them."""
        pairs, self.pairs = self.pairs, []
        return pairs
