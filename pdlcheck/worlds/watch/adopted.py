"""What ``init_process_group`` of a program may ask for where its rank has a default group already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

__all__ = ["require_known", "require_own"]


def require_known(backend: Any) -> None:
    """Refuse a backend that torch neither has nor was given, as it does itself; of the others each will do.

    Raises:
        AssertionError: the type that torch raises.
    """
    name = str(backend or dist.Backend.UNDEFINED).lower()
    if name in dist.Backend.backend_list:
        return
    for one in [pair.rpartition(":")[2] for pair in name.split(",")] if ":" in name else [name]:
        if one not in dist.Backend.backend_list:
            known = ", ".join(dist.Backend.backend_list[1:])  # the first is none
            raise AssertionError(f"Unknown backend type {one}; there are {known}, and what register_backend adds")


def require_own(asked: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Refuse another rank or world size; the world has chosen the backend."""
    for name, own in (("rank", rank), ("world_size", world_size)):
        if asked.get(name, -1) not in (-1, own):
            raise ValueError(f"init_process_group({name}={asked[name]}) on a rank whose {name} is {own}")
