"""The peak memory of PageRank: at most the amount that it states before it begins, and not much less."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from pdlcheck.primitives.pagerank import Graph, memory, pagerank, pagerank_many
from pdlcheck.primitives.pagerank.memory import many_nbytes, rank_nbytes, solver_nbytes, vectors_nbytes

pytestmark = pytest.mark.slow

MEASURING = """
import gc
import sys
from pathlib import Path
import numpy as np
from pdlcheck.primitives import pagerank as all_of_it
from pdlcheck.primitives.pagerank import Graph

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def most_taken(call, *given):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = status("VmRSS:")
    call(*given)
    return status("VmHWM:") - before

def drawn(num_nodes, num_edges, weighted):
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, num_nodes, (2, num_edges))
    return Graph(src, dst, num_nodes, rng.random(num_edges) if weighted else None)
"""


def measured(program, *arguments):
    """Return the numbers that a program prints in its own process, where freed memory returns to the system at once."""
    command = [sys.executable, "-c", MEASURING + program, *map(str, arguments)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


ONE_WAY = """
call, *sizes = sys.argv[1:]
call = eval(f"lambda graph: all_of_it.{call}")
call(drawn(2, 2, 1))
for k in range(0, len(sizes), 3):
    print(most_taken(call, drawn(*map(int, sizes[k : k + 3]))))
"""


def test_the_solver_takes_no_more_than_was_said_and_not_much_less():
    shapes = [(2_000_000, 500_000, 0), (100_000, 6_000_000, 0), (100_000, 3_000_000, 1)]
    taken = measured(ONE_WAY, "pagerank(graph, max_iter=2)", *(size for shape in shapes for size in shape))
    for (num_nodes, num_edges, weighted), nbytes in zip(shapes, taken, strict=True):
        said = solver_nbytes(num_nodes, num_edges, weighted=bool(weighted))
        assert said / 2 <= nbytes <= said, f"{num_nodes} nodes, {num_edges} edges: {nbytes} of {said}"


OTHER_WAYS = {
    "pagerank_v0(graph, iterations=2)": memory.MESSAGES,
    "pagerank_v1(graph, iterations=2)": memory.CSR,
    "pagerank_v1(graph, iterations=2, layout='coo')": memory.COO,
    "pagerank(graph, max_iter=2, kernel='csr')": memory.SORTED,
}
SHAPES = {"nodes": (1_000_000, 50_000, 0), "edges": (10_000, 1_000_000, 0), "weights": (10_000, 1_000_000, 1)}


@pytest.mark.parametrize("call", OTHER_WAYS)
def test_other_ways_to_rank_take_no_more_than_was_said_and_not_much_less(call):
    if "v0" in call:
        pytest.importorskip("dgl")
    taken = measured(ONE_WAY, call, *(size for shape in SHAPES.values() for size in shape))
    for (name, (num_nodes, num_edges, weighted)), nbytes in zip(SHAPES.items(), taken, strict=True):
        graph = Graph(*np.zeros((2, num_edges), np.int64), num_nodes, np.ones(num_edges) if weighted else None)
        said = OTHER_WAYS[call].nbytes(graph)
        assert said / 2 <= nbytes <= said, f"{name}: {nbytes} of {said}"


DENSE_WAYS = {"pagerank_v2(graph, iterations=2)": 8, "pagerank_v3(graph, iterations=2, fold='matmul')": 24,
              "pagerank_reference(graph)": 16}  # fmt: skip


@pytest.mark.parametrize("call", DENSE_WAYS)
def test_dense_ways_take_no_more_than_was_said_and_not_much_less(call):
    few_edges, many_edges = measured(ONE_WAY, call, *(3000, 2, 0), *(100, 2_000_000, 1))
    room = 1 << 24  # allowance for the matrix library
    assert DENSE_WAYS[call] * 3000**2 / 2 <= few_edges <= DENSE_WAYS[call] * 3000**2 + room
    said = DENSE_WAYS[call] * 100**2 + 2_000_000 * memory.DENSE.per_weighted_edge
    assert said / 2 <= many_edges <= said


OVER_RANKS = """
import torch.distributed as dist
from pdlcheck.worlds import get_world

world_size, *sizes = map(int, sys.argv[1:])

def on_ranks(parts, num_given):
    vectors = dict(zip(["personalization", "dangling", "start"], [{0: 1.0}] * num_given))
    graph = parts[dist.get_rank()]
    return all_of_it.pagerank_over_ranks(graph, num_nodes=graph.num_nodes, max_iter=2, **vectors)

def run(parts, num_given):
    get_world("sim").run(on_ranks, parts, num_given, world_size=world_size)

run([drawn(2, 2, 1)] * world_size, 0)
for k in range(0, len(sizes), 4):
    num_nodes, num_edges, weighted, num_given = sizes[k : k + 4]
    for most_leave, most_enter in ([False, False], [True, False], [False, True]):
        parts = []
        for _ in range(world_size):
            part = drawn(num_nodes, num_edges // world_size, weighted)
            src, dst = part.src * (not most_leave), part.dst * (not most_enter)
            parts.append(Graph(src, dst, num_nodes, part.weights))
        del part, src, dst
        print(most_taken(run, parts, num_given))
"""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_over_ranks_it_takes_no_more_than_was_said_and_not_much_less(world_size):
    """The limit is for all ranks together, on graphs whose edges are anywhere, leave one node, or enter one node."""
    shapes = [(*shape, given) for shape, given in zip([SHAPES["nodes"], *SHAPES.values()], (3, 0, 0, 0), strict=True)]
    taken = measured(OVER_RANKS, world_size, *(size for shape in shapes for size in shape))
    for k, (num_nodes, num_edges, weighted, given) in enumerate(shapes):
        own = num_nodes // world_size, num_nodes, 3 * num_edges // world_size, given
        said = world_size * rank_nbytes(*own, weighted=bool(weighted))
        assert len(taken) == 3 * len(shapes)
        for nbytes in taken[3 * k : 3 * k + 3]:
            assert said / 3 <= nbytes <= said, f"{shapes[k]}: {nbytes} of {said}"


@pytest.mark.parametrize("given", [(), ("personalization",), ("dangling", "personalization", "start")])
def test_on_a_graph_that_is_laid_out_it_takes_no_more_than_was_said_and_not_much_less(given):
    rng = np.random.default_rng(0)
    graph = Graph(*rng.integers(0, 1 << 19, (2, 1 << 20)), 1 << 19)
    vectors = {name: rng.random(1 << 19) for name in given}
    pagerank(graph)
    tracemalloc.start()
    try:
        pagerank(graph, tol=1e-12, **vectors)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    said = vectors_nbytes(graph.num_nodes, len(given))
    assert said / 2 <= peak <= said


@pytest.mark.parametrize("count", [1, 17])
@pytest.mark.parametrize("weighted", [False, True])
def test_many_vectors_take_no_more_than_was_said_and_not_much_less(count, weighted):
    rng = np.random.default_rng(0)
    ids, vectors = rng.integers(0, 1 << 16, (2, 1 << 20)), rng.random((count, 1 << 16))
    graph = Graph(*ids, 1 << 16, rng.random(1 << 20) if weighted else None)
    pagerank_many(([0, 1], [1, 0]), [None])  # compiles before the measurement
    tracemalloc.start()
    try:
        pagerank_many(graph, vectors, tol=1e-12, dangling=vectors[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    said = many_nbytes(1 << 16, count) + solver_nbytes(0, 1 << 20, weighted=weighted)
    assert said / 2 <= peak <= said


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_ranks_of_edges_in_arrays_take_at_most_12_bytes_an_edge(kind):
    """The limit covers layout and vectors above the arrays, with 16 edges a node; a Graph also has its own ids."""
    src, dst = np.random.default_rng(0).integers(0, 1 << 17, (2, 1 << 21)).astype(kind)
    pagerank((src[:100], dst[:100]))  # compiles before the measurement
    tracemalloc.start()
    try:
        assert pagerank((src, dst), tol=1e-8).converged
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 4 < peak / len(src) < 12
