"""The claims of the first document about its four versions, beside the results of a run.

Source: D. Gannon, "Doing Deep Learning in Parallel with PyTorch" (2020); it used one K80 and one CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["print_claims"]

PUBLISHED = {"v0 messages": "v0", "v1 sparse, COO": "v1", "v2 dense": "v2", "v3 folded, O(N^3)": "v3"}
ROUND_OFF = 1e-9  # an L1 distance over 10 000 nodes in float64, truncation after 200 rounds included
Claim = tuple[str, str, bool | None]


def print_claims(rows: Sequence[Any]) -> None:
    """Print one line for each claim and dtype; ``rows`` are the rows of a run that have times."""
    print(f"\n{'the document says':56}this run, as published")
    errors = [row.error for row in rows if row.dtype == "float64"]
    claims: list[Claim] = []
    if errors:
        found = f"float64: distance to the exact solution up to {max(errors):.1e}"
        claims.append(("all versions agree within round-off", found, max(errors) <= ROUND_OFF))
    for dtype in ("float32", "float64"):
        published = [row for row in rows if row.dtype == dtype and row.version in PUBLISHED]
        cpu, cuda = (
            {PUBLISHED[row.version]: row for row in published if row.device == device} for device in ("cpu", "cuda")
        )
        claims += [(claim, f"{dtype}: {found}", holds) for claim, found, holds in (*_of_cpu(cpu), *_of_gpu(cpu, cuda))]
    for claim, found, holds in claims:
        print(f"{claim:56}{found}; {'not measured' if holds is None else 'agrees' if holds else 'differs'}")


def _of_cpu(cpu: Mapping[str, Any]) -> list[Claim]:
    order = sorted(cpu, key=lambda version: cpu[version].all_s)
    times = ", ".join(f"{version} {cpu[version].all_s:.2f} s" for version in order)
    fastest = order[:2] == ["v2", "v0"] if len(cpu) == len(PUBLISHED) else None
    claims: list[Claim] = [("CPU: v2 is the fastest, v0 the second", times or "no row", fastest)]
    if {"v2", "v3"} <= cpu.keys():
        paid, saved = cpu["v3"].before_s - cpu["v2"].before_s, cpu["v2"].loop_s - cpu["v3"].loop_s
        found = f"{paid:.2f} s more before the loop, {saved:.2f} s less in it"
        claims.append(("CPU: v3's product costs more than it saves", found, paid > saved))
    return claims


def _of_gpu(cpu: Mapping[str, Any], cuda: Mapping[str, Any]) -> list[Claim]:
    gain = {version: cpu[version].all_s / cuda[version].all_s for version in sorted(cpu.keys() & cuda.keys())}
    found = ", ".join(f"{version} {times:.0f}x" for version, times in gain.items()) or "no row"
    both = {"v2", "v3"} <= gain.keys()
    dense = min(gain["v2"], gain["v3"]) if both else 0.0
    sparse = [cuda[version].all_s for version in ("v1", "v2") if version in cuda]
    return [
        ("GPU: v2 and v3 gain two to three orders of magnitude", found, dense >= 100 if both else None),
        ("GPU: v0 gains less", found, gain["v0"] < dense if both and "v0" in gain else None),
        (
            "GPU: sparse v1 is not competitive",
            ", ".join(f"{seconds:.3f} s" for seconds in sparse) or "no row",
            sparse[0] > sparse[1] if len(sparse) == 2 else None,
        ),
    ]
