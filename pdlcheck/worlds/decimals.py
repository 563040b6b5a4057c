"""Contexts of ``decimal``, which change in place: whether two of them say the same."""

from __future__ import annotations

from decimal import Context

__all__ = ["is_same"]


def is_same(one: Context, other: Context) -> bool:
    """Whether both compute alike; what either has met so far does not count."""
    return _said(one) == _said(other)


def _said(context: Context) -> tuple[object, ...]:
    limits = context.Emin, context.Emax, context.capitals, context.clamp
    return context.prec, context.rounding, *limits, context.traps
