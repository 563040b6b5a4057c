"""The amount of free memory, and the refusal of graphs that do not fit before they are allocated."""

from __future__ import annotations

import tracemalloc
import zipfile
from functools import partial

import numpy as np
import pytest

from pdlcheck.primitives import pagerank as all_of_it
from pdlcheck.primitives.arguments import Members
from pdlcheck.primitives.pagerank import Graph, memory, pagerank, pagerank_many, read_edges
from pdlcheck.primitives.pagerank.memory import free_memory, graph_nbytes, require_free_memory, vectors_nbytes
from pdlcheck.primitives.pagerank.ranks.room import Store, require_room

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


def test_ranks_that_share_a_memory_share_what_is_free_there():
    who = Members(None, (4, 5, 7), 0)
    a, less, b, gpu = Store("a", 4 * GIB), Store("a", 3 * GIB), Store("b", None), Store("cuda:0 of a", GIB)
    require_room("it", [[a], [less], [b]], [GIB, 2 * GIB, 99 * GIB], who, "stop")
    with pytest.raises(MemoryError, match=r"^it needs 3\.5 GiB for 2 ranks on a, 3\.0 GiB are free there; stop$"):
        require_room("it", [[a], [less], [b]], [GIB, 5 * GIB // 2, GIB], who, "stop")
    with pytest.raises(MemoryError, match=r"^it needs 2\.0 GiB for rank 5 on cuda:0 of a, 1\.0 GiB are free there"):
        require_room("it", [[b], [a, gpu], [b]], [GIB, 2 * GIB, GIB], who, "stop")


def test_a_graph_whose_ranks_cannot_fit_is_refused_at_once():
    graph = Graph.from_edges([0], [1], 10**13)
    with pytest.raises(MemoryError, match=r"ranking Graph\(num_nodes=10000000000000, .* GiB are free; use a machine"):
        pagerank(graph)


@pytest.mark.parametrize("rank", [
    all_of_it.pagerank_reference, all_of_it.pagerank_v0, all_of_it.pagerank_v1, all_of_it.pagerank_v2,
    all_of_it.pagerank_v3, partial(all_of_it.pagerank_v1, layout="coo"), partial(pagerank, kernel="csr"),
    partial(pagerank, kernel="csr", start={0: 1}),
])  # fmt: skip
def test_every_other_way_to_rank_refuses_what_cannot_fit_at_once(rank):
    if rank is all_of_it.pagerank_v0:
        pytest.importorskip("dgl")
    with pytest.raises(MemoryError, match=r"(pagerank_\w+|pagerank on cpu) needs \S+ GiB, \S+ GiB are free; use "):
        rank(Graph.from_edges([0], [1], 10**13))


def test_a_node_of_a_dict_is_found_without_a_table_of_all_nodes():
    graph = Graph.from_edges([0], [1], 1 << 22)
    tracemalloc.start()
    try:
        vector = graph.vector("start", {np.int32(3): 1.0, 4.0: 2.0, 5: 3.0})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert vector[3:6].tolist() == [1, 2, 3]
    assert peak < 2 * vector.nbytes
    with pytest.raises(ValueError, match=r"start: 4\.5 is not a node of the graph"):
        graph.vector("start", {3: 1, 4.5: 1})


def test_many_vectors_that_cannot_fit_are_refused_at_once():
    graph = Graph.from_edges([0], [1], 10**13)
    with pytest.raises(MemoryError, match=r"ranking Graph\(num_nodes=10000000000000, .* for 2 vectors needs .* fewer"):
        pagerank_many(graph, [None, {0: 1}])


def test_a_file_whose_edges_cannot_fit_is_refused_after_its_first_block(tmp_path):
    """The file is sparse on disk: everything after its first block is zeros that were never written."""
    path = tmp_path / "edges.txt"
    path.write_bytes(b"0 1\n1 2\n" * (1 << 20))
    with path.open("r+b") as file:
        file.truncate(1 << 43)
    with pytest.raises(MemoryError, match=r"edges.txt: ranking about \d{13} edges between 3 nodes needs"):
        read_edges(path)


def test_arrays_that_cannot_fit_are_refused_before_they_are_read(tmp_path):
    """The .npz file claims a large size for one of its arrays."""
    path = tmp_path / "edges.npz"
    np.savez(path, src=np.zeros(5, np.int64), dst=np.zeros(5, np.int64))
    with zipfile.ZipFile(path, "a") as archive:
        archive.getinfo("src.npy").file_size = 2**50
        archive.writestr("more.npy", b"")  # writes the directory again
    with pytest.raises(MemoryError, match=r"edges.npz: its arrays and the graph needs 20971\d\d.\d GiB"):
        read_edges(path)


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


def test_the_arrays_of_a_graph_are_as_large_as_was_said():
    graph = Graph.from_edges([0, 1, 2], [1, 2, 0], weights=[1.0, 2.0, 3.0])
    there = graph.src.nbytes + graph.dst.nbytes + graph.weights.nbytes
    assert there == graph_nbytes(3, weighted=True, id_nbytes=graph.src.itemsize)
