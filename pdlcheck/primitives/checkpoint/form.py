"""Whether what a file holds has the form that ``save_checkpoint`` gives it.

A digest tells that a file is as it was written, not who has written it.
"""

from __future__ import annotations

from typing import Any

from pdlcheck.primitives.checkpoint.streams import fit
from pdlcheck.primitives.checkpoint.tree import decode, is_tree

__all__ = ["well_formed"]


def well_formed(payload: dict[str, Any]) -> bool:
    """Look at all of it, so that nothing else of its form can be found wrong once an object was touched."""
    try:
        return _has_form(payload)
    except Exception:  # of whatever stands in a place that holds something else
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
        and all(_describes(told) for told in about.values())
        and all(rank in range(len(ranks)) and own.keys() == about.keys() for rank, own in others.items())
        and all(_describes(told) for own in others.values() for told in own.values())
        and all(nodes.keys() == names for nodes in ranks)
        and all(is_tree(node, tensors) for nodes in ranks for node in nodes.values())
        and all(fit(decode(nodes["rng"], tensors)) for nodes in ranks)
    )


def _is_number(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _describes(told: Any) -> bool:
    """A class, and of an optimizer each group's parameters: name, shape and dtype."""
    kind, groups = told
    return isinstance(kind, str) and all(
        isinstance(name, str) and isinstance(dtype, str) and all(_is_number(size, 0) for size in shape)
        for group in groups or []
        for name, shape, dtype in group
    )
