"""The private names of torch's pytrees."""

from __future__ import annotations

from typing import Any

from pdlcheck.compat.private import take

__all__ = ["tree_map"]

tree_map: Any = take(
    "torch.utils._pytree.tree_map",
    "arguments of ranks, in containers of any depth",
    lost="the simulated world cannot give each rank its own module globals",
)
