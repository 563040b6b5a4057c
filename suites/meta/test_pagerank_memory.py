"""How much memory is free, and that what does not fit is refused before it is allocated."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest

from pdlcheck.primitives.pagerank import Graph, memory, pagerank, pagerank_many, read_edges
from pdlcheck.primitives.pagerank.memory import (
    free_memory,
    graph_nbytes,
    many_nbytes,
    require_free_memory,
    solver_nbytes,
    vectors_nbytes,
)

GIB = 2**30


MEMINFO = {"proc/meminfo": f"MemTotal:  {64 * GIB // 1024} kB\nMemAvailable:  {40 * GIB // 1024} kB\n"}


def test_what_the_system_has_free_is_free_where_there_is_no_limit(system):
    assert free_memory(system(MEMINFO)) == 40 * GIB
    group = "sys/fs/cgroup/a"
    unlimited = {"proc/self/cgroup": "0::/a\n", f"{group}/memory.max": "max\n", f"{group}/memory.current": "5"}
    assert free_memory(system(unlimited)) == 40 * GIB


def test_nothing_is_known_without_proc(tmp_path):
    assert free_memory(tmp_path) is None


def test_a_limit_of_a_control_group_counts_and_page_cache_is_free(system):
    group = "sys/fs/cgroup/a/b"
    root = system(MEMINFO | {"proc/self/cgroup": "0::/a/b\n", f"{group}/memory.max": f"{8 * GIB}\n",
                             f"{group}/memory.current": f"{6 * GIB}\n",
                             f"{group}/memory.stat": f"anon 5\ninactive_file {GIB}\n"})  # fmt: skip
    assert free_memory(root) == 3 * GIB


def test_a_limit_of_a_group_around_it_counts(system):
    root = system(MEMINFO | {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": f"{4 * GIB}",
                             "sys/fs/cgroup/a/memory.current": "0", "sys/fs/cgroup/a/b/memory.max": "max",
                             "sys/fs/cgroup/a/b/memory.current": "0"})  # fmt: skip
    assert free_memory(root) == 4 * GIB


def test_a_limit_of_version_1_counts_and_its_unlimited_does_not(system):
    group = "sys/fs/cgroup/memory/a"
    files = {"proc/self/cgroup": "4:memory:/a\n2:cpu:/b\n0::/\n", f"{group}/memory.usage_in_bytes": f"{3 * GIB}",
             f"{group}/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n"}  # fmt: skip
    assert free_memory(system(MEMINFO | files | {f"{group}/memory.limit_in_bytes": f"{5 * GIB}"})) == 3 * GIB
    assert free_memory(system({f"{group}/memory.limit_in_bytes": "9223372036854771712"})) == 40 * GIB


def test_a_group_over_its_limit_has_nothing_left(system):
    root = system(MEMINFO | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000",
                             "sys/fs/cgroup/memory.current": "2000"})  # fmt: skip
    assert free_memory(root) == 0


def test_what_does_not_fit_is_refused_with_what_it_needs_and_what_is_free():
    with pytest.raises(MemoryError, match=r"^it needs 3\.0 GiB, 2\.5 GiB are free; make it smaller$"):
        require_free_memory("it", 3 * GIB, "make it smaller", free=5 * GIB // 2)
    require_free_memory("it", 3 * GIB, "make it smaller", free=3 * GIB)
    with pytest.raises(MemoryError, match="GiB are free"):
        require_free_memory("it", 2**60, "make it smaller")


def test_a_graph_whose_ranks_cannot_fit_is_refused_at_once():
    graph = Graph.from_edges([0], [1], 10**13)
    with pytest.raises(MemoryError, match=r"ranking Graph\(num_nodes=10000000000000, .* GiB are free; use a machine"):
        pagerank(graph)


def test_many_vectors_that_cannot_fit_are_refused_at_once():
    graph = Graph.from_edges([0], [1], 10**13)
    with pytest.raises(MemoryError, match=r"ranking Graph\(num_nodes=10000000000000, .* for 2 vectors needs .* fewer"):
        pagerank_many(graph, [None, {0: 1}])


@pytest.mark.parametrize("count", [1, 17])
@pytest.mark.parametrize("weighted", [False, True])
def test_many_vectors_take_no_more_than_was_said_and_not_much_less(count, weighted):
    rng = np.random.default_rng(0)
    ids, vectors = rng.integers(0, 1 << 16, (2, 1 << 20)), rng.random((count, 1 << 16))
    graph = Graph(*ids, 1 << 16, rng.random(1 << 20) if weighted else None)
    pagerank_many(([0, 1], [1, 0]), [None])  # what is compiled is no graph's
    tracemalloc.start()
    try:
        pagerank_many(graph, vectors, tol=1e-12, dangling=vectors[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    said = many_nbytes(1 << 16, count) + solver_nbytes(0, 1 << 20, weighted=weighted)
    assert said / 2 <= peak <= said


def test_a_file_whose_edges_cannot_fit_is_refused_after_its_first_block(tmp_path):
    """The file is sparse on disk: all but its first block are zeros that were never written."""
    path = tmp_path / "edges.txt"
    path.write_bytes(b"0 1\n1 2\n" * (1 << 20))
    with path.open("r+b") as file:
        file.truncate(1 << 43)
    with pytest.raises(MemoryError, match=r"edges.txt: ranking about \d{13} edges between 3 nodes needs"):
        read_edges(path)


def test_arrays_that_cannot_fit_are_refused_before_they_are_read(tmp_path):
    """An .npz that says of one of its arrays that it is large."""
    path = tmp_path / "edges.npz"
    np.savez(path, src=np.zeros(5, np.int64), dst=np.zeros(5, np.int64))
    with zipfile.ZipFile(path, "a") as archive:
        archive.getinfo("src.npy").file_size = 2**50
        archive.writestr("more.npy", b"")  # the directory is written again
    with pytest.raises(MemoryError, match=r"edges.npz: its arrays and the graph needs 20971\d\d.\d GiB"):
        read_edges(path)


PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from pdlcheck.primitives.pagerank import Graph, pagerank

num_nodes, num_edges, weighted = map(int, sys.argv[1:])
rng = np.random.default_rng(0)

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

pagerank(([0, 1], [1, 0], [1.0, 2.0]))  # compiles
src, dst = rng.integers(0, num_nodes, (2, num_edges))
graph = Graph(src, dst, num_nodes, rng.random(num_edges) if weighted else None)
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = status("VmRSS:")
pagerank(graph, max_iter=2)
print(status("VmHWM:") - before)
"""


@pytest.mark.parametrize(
    ("num_nodes", "num_edges", "weighted"),
    [(4_000_000, 1_000_000, 0), (100_000, 12_000_000, 0), (100_000, 6_000_000, 1)],
    ids=["nodes", "edges", "weights"],
)
def test_the_solver_takes_no_more_than_was_said_and_not_much_less(num_nodes, num_edges, weighted):
    command = [sys.executable, "-c", PROGRAM, *map(str, (num_nodes, num_edges, weighted))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    said = solver_nbytes(num_nodes, num_edges, weighted=bool(weighted))
    assert said / 2 <= int(done.stdout) <= said


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


def test_a_graph_that_is_laid_out_needs_no_room_for_that_again(monkeypatch):
    graph = Graph(*np.random.default_rng(0).integers(0, 1 << 17, (2, 1 << 21)), 1 << 17)
    free = vectors_nbytes(graph.num_nodes, 3)
    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(memory, "free_memory", lambda: free)
    with pytest.raises(MemoryError, match=r"ranking Graph.* GiB are free"):
        pagerank(graph)
    with monkeypatch.context() as more:
        more.setattr(memory, "free_memory", lambda: 2**40)
        pagerank(graph)
    assert pagerank(graph).converged
    monkeypatch.setattr(memory, "free_memory", lambda: free // 2)
    with pytest.raises(MemoryError, match=r"ranking Graph.* GiB are free"):
        pagerank(graph)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_ranks_of_edges_in_arrays_take_at_most_12_bytes_an_edge(kind):
    """Above the arrays, with 16 edges for each node: the layout and the vectors. A Graph has its own ids besides."""
    src, dst = np.random.default_rng(0).integers(0, 1 << 17, (2, 1 << 21)).astype(kind)
    pagerank((src[:100], dst[:100]))  # what is compiled is no graph's
    tracemalloc.start()
    try:
        assert pagerank((src, dst), tol=1e-8).converged
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 4 < peak / len(src) < 12


def test_the_arrays_of_a_graph_are_as_large_as_was_said():
    graph = Graph.from_edges([0, 1, 2], [1, 2, 0], weights=[1.0, 2.0, 3.0])
    there = graph.src.nbytes + graph.dst.nbytes + graph.weights.nbytes
    assert there == graph_nbytes(3, weighted=True, id_nbytes=graph.src.itemsize)
