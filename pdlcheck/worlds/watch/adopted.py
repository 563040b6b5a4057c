"""What ``init_process_group`` of a program may ask for where its rank has a default group already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["require_own"]


def require_own(asked: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Refuse another rank or world size; the world has chosen the backend."""
    for name, own in (("rank", rank), ("world_size", world_size)):
        if asked.get(name, -1) not in (-1, own):
            raise ValueError(f"init_process_group({name}={asked[name]}) on a rank whose {name} is {own}")
