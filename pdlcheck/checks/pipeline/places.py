"""The location of a fault in a pipeline: the micro-batches, and the layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pdlcheck.checks.pipeline.steps import Named, is_near
from pdlcheck.compat.torch.modules import submodules

__all__ = ["has_right_ones", "localise_error", "order_of_parts", "wrong_parts"]

SHOWN = 4


def wrong_parts(found: Tensor, goal: Tensor, count: int) -> str | None:
    """Return a text that lists the micro-batches whose outputs are wrong; None for a scalar."""
    if not goal.dim():
        return None
    parts = zip(found.tensor_split(count), goal.tensor_split(count), strict=True)
    wrong = [str(i) for i, (own, right) in enumerate(parts) if not is_near(own, right)]
    return f"{len(wrong)} of {count} micro-batches: {', '.join(wrong[:SHOWN])}{', ...' if wrong[SHOWN:] else ''}"


def order_of_parts(found: Tensor, goal: Tensor, count: int) -> str | None:
    """Return a text if ``found`` consists of the right outputs in another order of micro-batches, else None."""
    parts = list(goal.tensor_split(count)) if goal.dim() else []
    order, left = [], found
    while len(left):
        fits = [i for i, part in enumerate(parts) if i not in order and len(part) and is_near(left[: len(part)], part)]
        if not fits:
            return None
        order.append(fits[0])
        left = left[len(parts[fits[0]]) :]
    return f"micro-batches are in the order {order}"


def has_right_ones(everyone: Sequence[Named], wrong: Sequence[Sequence[str]], right: Named) -> bool:
    """Return whether a gradient that is not zero is right on every rank that holds it."""
    return bool(_right_ones(everyone, wrong, right))


def localise_error(
    model: nn.Module, everyone: Sequence[Named], wrong: Sequence[Sequence[str]], right: Named
) -> str | None:
    """Return a text that locates the fault between the layers of a sequential model, or None.

    The first layer with a right gradient proves that the gradient which reached it was right.
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        return None
    order = list(submodules(model))  # named_children lists a layer that occurs twice only once
    at = {name: order.index(_layer(name)) for name in _right_ones(everyone, wrong, right) if _layer(name) in order}
    if not at:
        return None
    name = min(at, key=lambda one: (at[one], one))
    spoilt = {_layer(one) for names in wrong for one in names}
    if alone := [layer for layer in order[at[name] :] if layer in spoilt]:
        layers = (
            f"layer{'s' if alone[1:] else ''} {', '.join(map(repr, alone[:SHOWN]))}{', ...' if alone[SHOWN:] else ''}"
        )
        return f"in {layers} alone: the gradient of {name!r}, which comes back through there, is right"
    return f"on the way back, after layer {_layer(name)!r}: its gradients and those of later layers are right"


def _layer(name: str) -> str:
    return name.split(".")[0]


def _right_ones(everyone: Sequence[Named], wrong: Sequence[Sequence[str]], right: Named) -> set[str]:
    """Return the names of right gradients. Zero gradients are left out, because they prove nothing."""
    held = {name for own in everyone for name in own if not is_near(torch.zeros_like(right[name]), right[name])}
    return held - {name for names in wrong for name in names}
