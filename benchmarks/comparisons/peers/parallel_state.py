"""Sixty names and sixty functions, as frameworks keep their groups: per-rank state for a benchmark."""

from __future__ import annotations

from typing import Any

for _number in range(60):
    globals()[f"_GROUP_{_number}"] = None
    exec(f"def get_group_{_number}():\n    return _GROUP_{_number}")


def initialize(group: Any) -> None:
    """Set every second name to a value of this rank."""
    globals().update((f"_GROUP_{number}", group) for number in range(0, 60, 2))
