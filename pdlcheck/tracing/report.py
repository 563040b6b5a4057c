"""The report of a comparison, as text and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from pdlcheck.tracing.comparison import Comparison, Parting

__all__ = ["as_json", "as_text"]


def as_text(found: Comparison) -> str:
    """Return the report for people."""
    dtype = str(found.dtype).removeprefix("torch.")
    limits = "the perturbed run" if found.is_estimated else f"a constant of {dtype}; a perturbed run gives sharper ones"
    lines = [f"note: {note}" for note in found.notes]
    if found.first is None:
        lines.append(
            f"the traces agree: {found.tensors} tensors of {found.steps} steps; "
            f"each is within {found.nearest:.2g} times its threshold, from {limits}"
        )
        return "\n".join(lines)
    return "\n".join([*lines, *_parting(found.first, dtype, limits)])


def _parting(first: Parting, dtype: str, limits: str) -> list[str]:
    place = first.place
    title = f"{place.module} ({place.class_name})" if place.class_name else place.module
    lines = [f"the traces part in step {first.step} at {title}, {place.direction}", ""]
    rows = [("tensor", place.tensor)]
    if first.micro_batch is not None:
        rows.append(("micro-batch", str(first.micro_batch)))
    if first.ranks:
        of = f", of {_numbers(first.all_ranks)}" if first.all_ranks else ""
        rows.append(("ranks" if len(first.ranks) > 1 else "rank", f"{_numbers(first.ranks)} wrong{of}"))
    if math.isfinite(first.times) or first.index:
        at = f"({', '.join(map(str, first.index))})"
        sizes = f"{first.distance.norm:.2g} of its size (largest element: {first.distance.peak:.2g})"
        limit = f"{first.limit.norm:.2g} (largest element: {first.limit.peak:.2g})"
        rows += [
            ("worst element", f"found {first.found:.6g} at {at}, expected {first.expected:.6g}"),
            ("distance", f"{sizes}, {first.times:.3g} times what {dtype} explains"),
            ("threshold", f"{limit}, from {limits}"),
        ]
    if place.evidence:
        rows.append(("before", place.evidence))
    rows.append(("likely cause", first.cause or "unknown: no known cause explains what was measured"))
    if first.others:
        more = f"{first.others} more tensors part" if first.others > 1 else "1 more tensor parts"
        rows.append(("after", f"{more} in this step and direction; what follows was not compared"))
    width = max(len(name) for name, _ in rows)
    return lines + [f"  {name:<{width}}  {text}" for name, text in rows]


def as_json(found: Comparison) -> str:
    """Return the report for programs; a number that is infinite or NaN is null."""
    return json.dumps(_finite(asdict(found) | {"dtype": str(found.dtype).removeprefix("torch.")}), indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
