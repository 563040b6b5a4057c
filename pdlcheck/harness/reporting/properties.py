"""Values that ranks record with ``record_property``: shown once if all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdlcheck.harness.reporting.common_notes import agreed

__all__ = ["record"]


def record(item: pytest.Item, values: Sequence[Sequence[Any]]) -> None:
    """Add the (name, value) pairs of every rank to those of the item."""
    item.user_properties += [(f"{name}{which}", value) for which, (name, value) in agreed(values)]
