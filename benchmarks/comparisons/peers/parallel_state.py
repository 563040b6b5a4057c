"""Sixty names and as many functions, as frameworks keep their groups: what ranks have for themselves in a benchmark."""

from __future__ import annotations

from typing import Any

for _number in range(60):
    globals()[f"_GROUP_{_number}"] = None
    exec(f"def get_group_{_number}():\n    return _GROUP_{_number}")


def initialize(group: Any) -> None:
    """Set every second name to something of the rank's own."""
    globals().update((f"_GROUP_{number}", group) for number in range(0, 60, 2))
