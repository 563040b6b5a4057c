"""Comparison of ``decimal`` contexts, which are changed in place."""

from __future__ import annotations

from decimal import Context

__all__ = ["is_same"]


def is_same(one: Context, other: Context) -> bool:
    """Return whether both contexts compute alike; the flags that each has raised so far do not count."""
    return _said(one) == _said(other)


def _said(context: Context) -> tuple[object, ...]:
    limits = context.Emin, context.Emax, context.capitals, context.clamp
    return context.prec, context.rounding, *limits, context.traps
