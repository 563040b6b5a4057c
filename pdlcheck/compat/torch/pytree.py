"""torch's walk through nested containers, which its own wrappers and pipelines use for inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pdlcheck.compat.private import take

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

_LOST = "nested inputs and outputs are not walked as torch walks them"

tree_flatten: Callable[[Any], tuple[list[Any], Any]] = take(
    "torch.utils._pytree.tree_flatten", "the leaves and the form of a nested value", lost=_LOST
)
tree_leaves: Callable[[Any], list[Any]] = take(
    "torch.utils._pytree.tree_leaves", "the tensors in a nested value", lost=_LOST
)
tree_map: Callable[[Callable[[Any], Any], Any], Any] = take(
    "torch.utils._pytree.tree_map", "a nested value with each tensor replaced", lost=_LOST
)
tree_unflatten: Callable[[Iterable[Any], Any], Any] = take(
    "torch.utils._pytree.tree_unflatten", "a nested value of a given form, made of new leaves", lost=_LOST
)
