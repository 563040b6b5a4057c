"""The report of a comparison, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

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
        several = "ranks" if len(first.ranks) > 1 else "rank"
        rows.append((several, f"{_numbers(first.ranks)} wrong, of {_numbers(first.all_ranks)}"))
    if first.index or first.distance.norm:
        at = f"({', '.join(map(str, first.index))})"
        rows.append(("worst element", f"found {first.found:.6g} at {at}, expected {first.expected:.6g}"))
        rows.append(
            (
                "distance",
                f"{first.distance.norm:.2g} of its size (largest element: {first.distance.peak:.2g}), "
                f"{first.times:.3g} times what {dtype} explains",
            )
        )
        rows.append(("threshold", f"{first.limit.norm:.2g} (largest element: {first.limit.peak:.2g}), from {limits}"))
    if place.evidence:
        rows.append(("before", place.evidence))
    rows.append(("likely cause", first.cause or "unknown: no known cause explains what was measured"))
    if first.others:
        rows.append(
            ("after", f"{first.others} more tensors part in this step and direction; what follows was not compared")
        )
    width = max(len(name) for name, _ in rows)
    return lines + [f"  {name:<{width}}  {text}" for name, text in rows]


def as_json(found: Comparison) -> str:
    """Return the report for programs."""
    return json.dumps(asdict(found) | {"dtype": str(found.dtype).removeprefix("torch.")}, indent=2)


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
