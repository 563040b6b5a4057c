# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The Triton kernels of a round. This is the one file that imports Triton.

All sums are in float64, in an order that the graph alone decides. There is no atomic operation, so the same graph gives
the same bits. Numbers come in tensors, because a kernel receives a Python float as a float32.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        f"kernel='triton' needs Triton ({error}), which comes with torch for CUDA; else: pip install triton, "
        "or use kernel='csr'"
    ) from error

__all__ = ["add_chunks", "add_parts", "interpreted", "update_rows"]


@triton.jit
def add_chunks(sources, shares, sent, chunk_begin, chunk_place, sums, WEIGHTED: tl.constexpr, LANES: tl.constexpr):
    """Store in ``sums[chunk_place[c]]`` the sum of the entries of chunk c; one program per chunk."""
    chunk = tl.program_id(0)
    end = tl.load(chunk_begin + chunk + 1)
    lane = tl.arange(0, LANES)
    arrived = tl.zeros((LANES,), tl.float64)
    for first in range(tl.load(chunk_begin + chunk), end, LANES):
        place = first + lane
        there = place < end
        source = tl.load(sources + place, mask=there, other=0, eviction_policy="evict_first")
        value = tl.load(sent + source, mask=there, other=0.0).to(tl.float64)
        if WEIGHTED:
            value *= tl.load(shares + place, mask=there, other=0.0, eviction_policy="evict_first")
        arrived += value
    tl.store(sums + tl.load(chunk_place + chunk), tl.sum(arrived, 0))


@triton.jit
def update_rows(
    sources,
    shares,
    sums,
    first_step,
    end_step,
    long_slices,
    longest_chunk,
    sent,
    out_degree,
    num_nodes,
    factors,
    teleport,
    landing,
    scores,
    sent_next,
    totals,
    parts,
    num_slices,
    WEIGHTED: tl.constexpr,
    UNIFORM: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Compute ``score = d * arrived + (1 - d) * v + d * m * w`` for the rows of slice s; one program per slice.

    ``factors`` holds d, 1 - d, and with ``UNIFORM`` the one number in v and w. ``m`` is the sum of ``totals[1]``.
    ``parts[k, s]`` gets the contribution of these rows to ``totals[k]``.
    """
    slice_ = tl.program_id(0)
    end = tl.load(end_step + slice_)
    lane = tl.arange(0, BLOCK)
    number = tl.arange(0, STEPS)
    arrived = tl.zeros((STEPS, BLOCK), tl.float64)
    additions = end - tl.load(first_step + slice_)
    if slice_ < long_slices:
        additions += longest_chunk
        for step in range(tl.load(first_step + slice_), end, STEPS):
            there = (step + number < end)[:, None]
            place = (step + number)[:, None] * BLOCK + lane[None, :]
            arrived += tl.load(sums + place, mask=there, other=0.0)
    else:
        for step in range(tl.load(first_step + slice_), end, STEPS):
            there = (step + number < end)[:, None]
            place = (step + number)[:, None] * BLOCK + lane[None, :]
            source = tl.load(sources + place, mask=there, other=0, eviction_policy="evict_first")
            value = tl.load(sent + source, mask=there, other=0.0).to(tl.float64)
            if WEIGHTED:
                value *= tl.load(shares + place, mask=there, other=0.0, eviction_policy="evict_first")
            arrived += value

    row = slice_.to(tl.int64) * BLOCK + lane
    damping, rest = tl.load(factors), tl.load(factors + 1)
    mass = damping * tl.sum(tl.load(totals + GROUPS + tl.arange(0, GROUPS)), 0)
    if UNIFORM:
        added = (rest + mass) * tl.load(factors + 2)
    else:
        added = rest * tl.load(teleport + row) + mass * tl.load(landing + row)
    score = tl.where(row < num_nodes, damping * tl.sum(arrived, 0) + added, 0.0)
    degree = tl.load(out_degree + row)
    moved = tl.abs(score - tl.load(scores + row))
    tl.store(scores + row, score)
    each = tl.where(degree > 0, score / tl.where(degree > 0, degree, 1).to(tl.float64), 0.0)
    tl.store(sent_next + row, each.to(sent_next.dtype.element_ty))
    tl.store(parts + slice_, tl.sum(moved, 0))
    tl.store(parts + num_slices + slice_, tl.sum(tl.where(degree > 0, 0.0, score), 0))
    tl.store(parts + 2 * num_slices + slice_, additions.to(tl.float64) * tl.sum(score, 0))


@triton.jit
def add_parts(parts, totals, num_slices, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """Store in ``totals[k, g]`` the part of program g in the sum of ``parts[k]``.

    ``totals[3]`` gets the previous value of ``totals[1]``.
    """
    group = tl.program_id(0)
    lane = tl.arange(0, LANES)
    step = tl.zeros((LANES,), tl.float64)
    mass = tl.zeros((LANES,), tl.float64)
    gathered = tl.zeros((LANES,), tl.float64)
    for first in range(group * LANES, num_slices, GROUPS * LANES):
        slice_ = first + lane
        there = slice_ < num_slices
        step += tl.load(parts + slice_, mask=there, other=0.0)
        mass += tl.load(parts + num_slices + slice_, mask=there, other=0.0)
        gathered += tl.load(parts + 2 * num_slices + slice_, mask=there, other=0.0)
    tl.store(totals + 3 * GROUPS + group, tl.load(totals + GROUPS + group))
    tl.store(totals + group, tl.sum(step, 0))
    tl.store(totals + GROUPS + group, tl.sum(mass, 0))
    tl.store(totals + 2 * GROUPS + group, tl.sum(gathered, 0))


def interpreted() -> bool:
    """Return whether TRITON_INTERPRET was set: the kernels then run on the CPU, slowly, for tests."""
    return not isinstance(update_rows, triton.JITFunction)
