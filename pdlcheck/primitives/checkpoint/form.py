"""Checks that the content of a file has the form that ``save_checkpoint`` writes.

The digest shows that the file has not changed. It does not show that ``save_checkpoint`` wrote it.
"""

from __future__ import annotations

from typing import Any

from pdlcheck.primitives.checkpoint.streams import can_restore
from pdlcheck.primitives.checkpoint.tree import decode, is_tree

__all__ = ["well_formed"]


def well_formed(payload: dict[str, Any]) -> bool:
    """Return whether the whole payload has the right form. Call it before any object is changed."""
    try:
        return _has_form(payload)
    except Exception:  # a field of another type can raise anything
        return False


def _has_form(payload: dict[str, Any]) -> bool:
    ranks, tensors, about = payload["ranks"], payload["tensors"], payload["about"]
    others = payload.get("others", {})
    names = {*about, "rng"}
    return (
        _is_number(payload["step"], 0)
        and _is_number(payload["world_size"], 1)
        and len(ranks) == payload["world_size"]
        and all(isinstance(name, str) for name in names)
        and all(_is_description(description) for description in about.values())
        and all(rank in range(len(ranks)) and own.keys() == about.keys() for rank, own in others.items())
        and all(_is_description(description) for own in others.values() for description in own.values())
        and all(nodes.keys() == names for nodes in ranks)
        and all(is_tree(node, tensors) for nodes in ranks for node in nodes.values())
        and all(can_restore(decode(nodes["rng"], tensors)) for nodes in ranks)
    )


def _is_number(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _is_description(description: Any) -> bool:
    """Return whether it has a class name and, for an optimizer, name, shape and dtype of each group's parameters."""
    kind, groups = description
    return isinstance(kind, str) and all(
        isinstance(name, str) and isinstance(dtype, str) and all(_is_number(size, 0) for size in shape)
        for group in groups or []
        for name, shape, dtype in group
    )
