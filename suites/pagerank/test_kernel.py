"""The kernel of :func:`pagerank`: memory, id widths, threads, cost of a first call; other files test the scores."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import pdlcheck
from pdlcheck.checks.pagerank.scores import check_error_bound, check_pagerank
from pdlcheck.primitives.pagerank import Graph, graph, layout, pagerank, threads
from pdlcheck.primitives.pagerank.datasets import rmat

pytestmark = pytest.mark.verifies("pagerank")


def edges(num_nodes: int, num_edges: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw uniform sources below nine tenths of ``num_nodes``; destinations concentrate at small ids."""
    rng = np.random.default_rng(seed)
    src = rng.integers(0, max(1, num_nodes * 9 // 10), num_edges)
    return src, (num_nodes * rng.random(num_edges) ** 2).astype(np.int64)


def peak_bytes(function) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_arrays_are_ranked_within_12_bytes_an_edge():
    """The bound is above the arrays themselves; a Graph holds its own ids, 8 bytes more."""
    src, dst = edges(20_000, 3_000_000)
    pagerank((src, dst))  # compiles, and makes threads and caches
    assert peak_bytes(lambda: pagerank((src, dst))) < 12 * len(src)
    assert peak_bytes(lambda: pagerank(Graph(src, dst, 20_000))) < 16 * len(src)


def test_a_graph_holds_8_bytes_an_edge_and_12_once_laid_out():
    src, dst = edges(20_000, 3_000_000)
    tracemalloc.start()
    try:
        ours = Graph(src, dst, 20_000)
        assert tracemalloc.get_traced_memory()[0] < 8.1 * len(src)
        layout.layout_of(ours)
        assert tracemalloc.get_traced_memory()[0] < 12.5 * len(src)
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("num_edges", [5000, 1_200_000], ids=["one block", "many"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_ids_and_counts_beyond_int32_give_the_same_bits(monkeypatch, num_edges, weighted):
    """Only the limit is lowered, so this equals a graph of 2**31 nodes, or of as many edges."""
    src, dst = edges(500, num_edges)
    weights = np.random.default_rng(1).random(num_edges) if weighted else None
    narrow = Graph(src, dst, 500, weights)
    expected = pagerank(narrow).scores
    monkeypatch.setattr(graph, "NARROW", 400)
    monkeypatch.setattr(layout, "NARROW", 400)
    wide = Graph(src, dst, 500, weights)
    assert (narrow.src.dtype, wide.src.dtype) == (np.int32, np.int64)
    assert layout.layout_of(wide).sources.dtype == np.int64
    assert pagerank(wide).scores.tobytes() == expected.tobytes()
    check_pagerank(pagerank, wide)


def test_places_of_edges_are_int64():
    """A graph of more than 2**31 edges has such places; sums of degrees in int32 would wrap around."""
    laid_out = layout.layout_of(Graph(*edges(500, 1_200_000), 500))
    assert laid_out.begins.dtype == np.int64
    assert laid_out.begins[-1] == len(laid_out.sources) >= 1_200_000


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_the_layout_is_the_same_whoever_builds_it(monkeypatch, weighted):
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    src, dst = edges(5000, 1_300_000)
    weights = np.random.default_rng(1).random(len(src)) if weighted else None
    ours, before, found = Graph(src, dst, 5000, weights), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            made = layout.lay_out(ours)
            shares = b"" if made.shares is None else made.shares.tobytes()
            found.append((made.sources.tobytes(), shares, made.out.tobytes()))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_every_edge_has_one_place_in_the_row_of_its_destination():
    src, dst = edges(3000, 1_200_000)
    made = layout.lay_out(Graph(src, dst, 3000))
    rows = np.full(len(made.sources), -1)
    for row in range(made.long_rows):
        rows[made.begins[row] : made.begins[row + 1]] = row
    for unit in range(made.long_rows, len(made.begins) - 1):
        places = np.arange(made.begins[unit], made.begins[unit + 1])
        rows[places] = made.long_rows + (unit - made.long_rows) * 16 + (places - made.begins[unit]) % 16
    taken = np.isin(made.sources, made.row)  # the other places are padding
    expected = np.sort(made.row[dst].astype(np.int64) * made.num_rows + made.row[src])
    assert np.array_equal(np.sort(rows[taken] * made.num_rows + made.sources[taken]), expected)


def sinks_of(kind: str) -> Graph:
    """Return a graph of 3000 nodes and 1 200 000 edges, in which the sinks have their own kernel."""
    src, dst = edges(3000, 1_200_000)
    draw = np.random.default_rng(1)
    if kind == "half of the nodes":
        src //= 2
    elif kind == "all that is reached":
        src, dst = src // 2, 1500 + dst // 2
    elif kind == "one with most of the edges":
        dst[draw.random(len(dst)) < 0.9] = 2999
    elif kind == "all that have weight 0":
        return Graph(src, dst, 3000, draw.random(len(src)) * (src % 3 > 0))
    return Graph(src, dst, 3000)


@pytest.mark.parametrize(
    "kind", ["half of the nodes", "all that is reached", "one with most of the edges", "all that have weight 0"]
)
def test_sinks_have_their_scores_and_what_they_hold_is_spread(kind):
    ours = sinks_of(kind)
    check_pagerank(pagerank, ours)
    check_error_bound(pagerank, ours)


def test_a_sink_with_most_of_the_edges_is_a_row_that_is_summed_alone():
    """In a slice with fifteen short rows it would take sixteen places for each edge."""
    ours = sinks_of("one with most of the edges")
    made = layout.layout_of(ours)
    assert len(made.sources) < 1.1 * ours.num_edges
    assert made.row[2999] == 0


@pytest.mark.parametrize(("sinks", "apart"), [(100, 0), (200, 200)])
def test_sinks_are_apart_where_they_are_many(sinks, apart):
    draw = np.random.default_rng(0)
    ours = Graph(draw.integers(sinks, 3000, 100_000), draw.integers(0, 3000, 100_000), 3000)
    found = layout.layout_of(ours)
    assert (found.num_sinks, found.leaving is None) == (apart, apart == 0)
    check_pagerank(pagerank, ours)


def test_dangling_mass_that_half_of_the_nodes_hold_costs_no_more_rounds():
    """The solver takes 15 rounds; it took 22 when it used the mass that the last round left."""
    assert pagerank(rmat(17, 1_200_000), tol=1e-9).iterations < 18


@pytest.mark.parametrize(("num_nodes", "num_edges", "tol"), [(300, 1200, 1e-10), (300_000, 1_200_000, 1e-12)])
def test_a_graph_almost_of_sinks_takes_no_more_rounds_than_powers_do(num_nodes, num_edges, tol):
    """Scaling by the sum of all scores, without the mass of the sinks, takes half as many rounds again."""
    draw = np.random.default_rng(2)
    ours = Graph(draw.integers(0, num_nodes // 100, num_edges), draw.integers(0, num_nodes, num_edges), num_nodes)
    fast, powers = (pagerank(ours, tol=tol, method=method) for method in ("gauss-seidel", "power"))
    assert fast.converged
    assert fast.iterations <= powers.iterations


def test_scores_that_sinks_hold_alone_are_found():
    """The senders have no score, so there is nothing to scale."""
    on_sinks = {2: 1, 3: 2}
    ours = Graph(np.array([0, 1, 1]), np.array([2, 2, 3]), 4)
    result = pagerank(ours, personalization=on_sinks, start={0: 1})
    assert result.converged
    assert result.scores == pytest.approx([0, 0, 1 / 3, 2 / 3])
    path = Graph(np.arange(19), np.arange(1, 20), 25)  # too long for its nodes to be upstream of the rest
    result = pagerank(path, personalization={24: 1}, start={18: 1})
    assert result.converged
    assert result.scores[24] == pytest.approx(1)


@pytest.mark.parametrize("num_nodes", [15, 16, 17, 100, 1000, 5000])
def test_every_node_has_a_row_of_its_own(num_nodes):
    """Rows of equal degree are spread over slices: classes of one node, a part of a slice, whole slices, and both."""
    draw = np.random.default_rng(num_nodes)
    src, dst = draw.integers(0, 1 + num_nodes // 2, 2 * num_nodes), draw.integers(0, num_nodes, 2 * num_nodes)
    ours = Graph(src, dst, num_nodes)
    made = layout.lay_out(ours)
    assert len(np.unique(made.row)) == num_nodes
    sinks, upstream = (made.row >= made.first_sink) & (made.row < made.end_of_blocks), made.row >= made.end_of_blocks
    assert np.array_equal(sinks, ours.dangling)
    assert made.num_sinks == sinks.sum()
    in_degree = np.bincount(dst[~upstream[src]], minlength=num_nodes)
    assert np.all(in_degree[upstream] == 0)
    for part in (~(sinks | upstream), sinks, upstream):
        rows = np.sort(made.row[part])
        assert np.array_equal(rows, rows[:1] + np.arange(len(rows)))
        assert np.all(np.diff(in_degree[part][np.argsort(made.row[part])]) <= 0)


@pytest.mark.parametrize("method", ["power", "gauss-seidel"])
def test_neighbours_by_id_take_no_more_rounds_than_strangers(method):
    """Sixteen rows are updated at a time. Neighbours among them would read old values: 84 rounds instead of 36."""
    there = np.arange(4000)
    back = (there + 1) % 4000
    new, pull = np.random.default_rng(0).permutation(4000), np.random.default_rng(1).random(4000) ** 8
    elsewhere = np.empty(4000)
    elsewhere[new] = pull
    ring, mixed = (Graph(np.append(a, b), np.append(b, a), 4000) for a, b in ((there, back), (new[there], new[back])))
    found = pagerank(ring, personalization=pull, tol=1e-6, method=method)
    expected = pagerank(mixed, personalization=elsewhere, tol=1e-6, method=method)
    assert found.iterations <= expected.iterations
    assert abs(found.scores - expected.scores[new]).sum() <= 2e-6


def test_a_bad_id_far_in_is_named_by_its_place():
    src, dst = edges(500, 400_000)
    src[333_333] = -7
    with pytest.raises(ValueError, match=r"src holds -7 at 333333, ids must be in \[0, 500\)"):
        Graph(src, dst, 500)
    with pytest.raises(ValueError, match="src holds -7 at 333333"):
        pagerank((src, dst))


@pytest.mark.parametrize("method", ["power", "gauss-seidel"])
def test_a_warm_start_in_float32_reaches_its_bound_in_fewer_rounds(method):
    src, dst = edges(2000, 1_200_000)
    before = pagerank(Graph(src, dst, 2000)).scores
    dst[:100] = np.arange(100)
    changed = Graph(src, dst, 2000)
    cold, warm = pagerank(changed, method=method), pagerank(changed, start=before, method=method)
    assert warm.converged
    assert warm.iterations < cold.iterations
    check_error_bound(partial(pagerank, start=before, method=method), changed)


@pytest.mark.parametrize("damping", [0.85, 0.95])
@pytest.mark.parametrize("first", ["uniform", "senders", "one sender"])
def test_a_start_that_is_far_from_the_ranks_costs_rounds_and_no_more(damping, first):
    """The senders have no rank here, so a correction along the start would be wrong."""
    rng, n = np.random.default_rng(0), 200_000
    ours = Graph(rng.integers(0, n // 2, 1_500_000), rng.integers(0, n, 1_500_000), n)
    start = {"uniform": np.ones(n), "senders": np.arange(n) < n // 2, "one sender": np.arange(n) == 3}[first]
    found = pagerank(ours, personalization={n - 1: 1}, start=start.astype(float), damping=damping)
    assert found.converged
    assert found.iterations < 60
    assert found.scores[-1] == pytest.approx(1)


def test_a_start_that_is_near_costs_few_rounds_where_sinks_hold_most():
    """The solver takes 25 rounds; it took 90 when the sum was corrected without the sinks that follow."""
    rng, n = np.random.default_rng(0), 200_000
    ours = Graph(rng.integers(0, n * 9 // 10, 1_500_000), rng.integers(0, n, 1_500_000), n)
    on_a_sink = {"personalization": {n - 1: 1}, "damping": 0.95}
    before = pagerank(ours, **on_a_sink).scores
    found = pagerank(ours, **on_a_sink, tol=1e-11, start=before + 1e-3 * rng.random(n) / n)
    assert found.converged
    assert found.iterations < 40


@pytest.mark.parametrize("tol", [1e-6, 1e-8])
def test_rounding_that_keeps_itself_up_is_refined_away(tol):
    """An error that rotates ends in float32 in a cycle of length two, whose step looks like progress."""
    leaves = np.arange(1, 800_000)
    back = leaves[: len(leaves) // 2]
    star = Graph.from_edges(np.append(leaves, 0 * back), np.append(0 * leaves, back))
    found = pagerank(star, personalization={5: 1}, tol=tol, method="power")
    assert found.converged


def test_no_score_is_negative():
    """The correction is below 0 where the start was above the rank, and it is rounded."""
    rng, n = np.random.default_rng(0), 100_000
    ours = Graph(*rng.integers(0, n // 2, (2, 1_200_000)), n)
    on_half = (np.arange(n) < n // 2).astype(float)
    before = pagerank(ours, personalization=on_half).scores
    found = pagerank(ours, personalization=on_half, start=before + 1e-3 * rng.random(n) / n, tol=1e-6)
    assert found.converged
    assert found.scores.min() == 0


@pytest.mark.parametrize("tol", [1e-5, 1e-9])
def test_scores_that_were_made_in_float32_sum_to_one_in_float64(tol):
    src, dst = edges(2000, 1_200_000)
    assert abs(pagerank(Graph(src, dst, 2000), tol=tol).scores.sum() - 1) <= 1e-13


@pytest.mark.slow
def test_a_second_process_finds_the_kernels_compiled_also_where_the_package_cannot_be_written(tmp_path):
    """Numba writes beside the source, else to the user's cache folder; NUMBA_CACHE_DIR names another."""
    program = (
        "import time; from pdlcheck.primitives.pagerank import kernels, pagerank; began = time.perf_counter(); "
        "pagerank(([0, 1], [1, 0])); print(sum(kernels.sweep.stats.cache_misses.values()))"
    )
    root = Path(pdlcheck.__file__).parents[1]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    run = partial(subprocess.run, [sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    first, second = run(check=True), run(check=True)
    assert (first.stdout.strip(), second.stdout.strip()) == ("1", "0")


CYCLE = ([0, 1, 2, 3], [1, 2, 0, 0])
VECTORS = {"personalization": [1.0, 2.0, 3.0, 4.0], "dangling": [0.0, 0.0, 1.0, 1.0]}


@pytest.mark.beyond_contract("dampings near 1")
@pytest.mark.parametrize("damping", [0.999, 0.999999])
@pytest.mark.parametrize("ends", [CYCLE, ([0, 1, 3], [1, 2, 3])], ids=["cycle", "dangling"])
@pytest.mark.parametrize("vectors", [{}, VECTORS], ids=["uniform", "vectors"])
def test_a_damping_near_1_on_few_nodes_takes_no_hours(subject, damping, ends, vectors):
    """Without the direct solution it would take 34 000 and 16 million rounds."""
    ranked = partial(subject, damping=damping, **vectors)
    assert ranked(ends).iterations < 100
    check_error_bound(ranked, Graph.from_edges(*ends), damping=damping, reachable=True, **vectors)


@pytest.mark.beyond_contract("dampings near 1")
def test_where_float64_cannot_tell_damping_from_1_rounds_say_what_they_reach(subject):
    result = subject(CYCLE, damping=1 - 1e-16, max_iter=20_000)
    assert not result.converged
    assert result.error_bound > 1
    assert result.scores.sum() == pytest.approx(1)


@pytest.mark.if_subject_takes("method", "start")
def test_what_is_asked_for_is_done_by_rounds(subject):
    """A given method or a given start excludes the direct solution."""
    assert subject(CYCLE, damping=0.999, method="power").iterations > 1000
    assert subject(CYCLE, damping=0.999, method="gauss-seidel").iterations > 1000
    assert subject(CYCLE, damping=0.999, start=[0, 0, 0, 1]).iterations > 1000
