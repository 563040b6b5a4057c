"""PageRank on a device: CSR rounds and the stop rule anywhere, the kernels in Triton's interpreter and on CUDA."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlcheck.checks.graphs import CORNERS, graphs
from pdlcheck.checks.pagerank import check_error_bound, check_pagerank
from pdlcheck.primitives.pagerank import Graph, document_graph, pagerank, pagerank_reference
from pdlcheck.primitives.pagerank.arguments import distribution
from pdlcheck.primitives.pagerank.device.csr import CsrMatrix, CsrSweep
from pdlcheck.primitives.pagerank.device.edges import edges_on
from pdlcheck.primitives.pagerank.device.slices import BLOCK, cut_into_slices
from pdlcheck.primitives.pagerank.device.solver import DeviceRounds, Solution, solve_on_device
from pdlcheck.primitives.pagerank.device.sweep import Problem

pytestmark = pytest.mark.verifies("pagerank")

CPU = torch.device("cpu")
DAMPING = st.sampled_from([0.85, 0.0, 0.3, 0.95])
NEEDS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton, which comes with torch for CUDA; else: pip install triton"
)
each_kernel = pytest.mark.parametrize("kernel", ["csr", pytest.param("triton", marks=NEEDS_TRITON)])


def solve_from_float32(graph: Graph, *, tol: float = 1e-8, damping: float = 0.85, max_iter: int = 1000) -> Solution:
    """The CSR rounds, with float32 at first on a graph of any size."""
    if graph.num_nodes == 0:
        return Solution(np.zeros(0), 0, 0.0, True)
    v = distribution("personalization", None, graph)
    return solve_on_device(graph, CPU, "csr", damping, tol, max_iter, v, v, v, start_in=torch.float32)


def star(leaves: int) -> Graph:
    """All leaves point to the hub, node 0, and the hub to one of them."""
    return Graph(np.r_[1 : leaves + 1, 0], np.r_[np.zeros(leaves, np.int64), 1], leaves + 1)


def star_ranks(leaves: int, d: float = 0.85) -> np.ndarray:
    """By hand."""
    base = (1 - d) / (leaves + 1)
    ranks = np.full(leaves + 1, base)
    ranks[0] = base * (1 + leaves * d) / (1 - d * d)
    ranks[1] = base + d * ranks[0]
    return ranks


# ---- CSR rounds, on the CPU


@given(graph=graphs(Graph.from_edges), damping=DAMPING, tol=st.sampled_from([1e-2, 1e-5, 1e-8, 1e-11, 1e-17]))
def test_the_bound_of_csr_rounds_holds_for_the_true_error(subject, graph, damping, tol):
    check_error_bound(partial(subject, damping=damping, tol=tol, kernel="csr"), graph, damping=damping, tol=tol)


@pytest.mark.parametrize("corner", CORNERS)
def test_csr_rounds_rank_a_named_graph(subject, corner):
    edges = CORNERS[corner]
    graph = Graph.from_edges(edges.src, edges.dst, edges.num_nodes, edges.weights)
    check_pagerank(partial(subject, kernel="csr"), graph)


@st.composite
def graphs_with_vectors(draw):
    graph = draw(graphs(Graph.from_edges).filter(lambda g: g.num_nodes > 0))
    numbers = st.lists(st.integers(0, 5), min_size=graph.num_nodes, max_size=graph.num_nodes).filter(any)
    return graph, np.array(draw(numbers)), draw(st.none() | numbers.map(np.array)), draw(st.none() | numbers)


@given(case=graphs_with_vectors())
def test_csr_rounds_honour_all_vectors(subject, case):
    graph, v, w, start = case
    function = partial(subject, personalization=v, dangling=w, start=start, kernel="csr")
    check_pagerank(function, graph, personalization=v, dangling=w)
    check_error_bound(function, graph, personalization=v, dangling=w)


@given(graph=graphs(Graph.from_edges), rounds=st.integers(1, 20))
def test_max_iter_stops_csr_rounds_with_a_bound_that_holds(subject, graph, rounds):
    function = partial(subject, max_iter=rounds, kernel="csr", tol=1e-12)
    check_error_bound(function, graph, tol=1e-12)
    assert function(graph).iterations <= rounds


@pytest.mark.parametrize("degree", [3, 30])
def test_csr_rounds_on_more_nodes_than_one_sum_takes(subject, degree):
    """A node in ten is dangling, so that their mass, a long sum, matters."""
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 2600, 2600 * degree), rng.integers(0, 2900, 2600 * degree)
    graph = Graph.from_edges(src, dst, 2900)
    check_error_bound(partial(subject, kernel="csr", tol=1e-11), graph, tol=1e-11)


def test_csr_rounds_accept_edges_that_occur_twice_where_torch_checks_matrices(subject):
    graph = Graph.from_edges([0, 0, 0, 1], [1, 1, 2, 0], 3)
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        check_pagerank(partial(subject, kernel="csr"), graph)


# ---- the stop rule


def test_the_host_looks_every_eight_rounds(subject):
    graph = document_graph(300, mean_degree=6)
    rounds = [subject(graph, tol=10.0**-k, kernel="csr").iterations for k in range(1, 12)]
    assert {count % 8 for count in rounds} == {0}
    needed = [subject(graph, tol=10.0**-k, method="power").iterations for k in range(1, 12)]
    assert all(n <= count < n + 8 for n, count in zip(needed, rounds, strict=True))


def test_rounds_end_where_only_rounding_is_left(subject):
    result = subject(document_graph(50), tol=1e-18, kernel="csr")
    assert not result.converged
    assert 1e-18 < result.error_bound < 1e-12
    assert result.iterations < 200


@given(graph=graphs(Graph.from_edges), damping=DAMPING, tol=st.sampled_from([1e-2, 1e-5, 1e-8, 1e-11]))
def test_the_bound_holds_from_float32_to_float64(graph, damping, tol):
    function = partial(solve_from_float32, damping=damping, tol=tol)
    check_error_bound(function, graph, damping=damping, tol=tol)
    assert function(graph).converged


def rounds_of(graph: Graph, dtype: torch.dtype) -> DeviceRounds:
    v = torch.from_numpy(distribution("personalization", None, graph))
    sweep = CsrSweep(CsrMatrix(edges_on(graph, CPU)), Problem(0.85, v, v))
    return DeviceRounds(sweep, 0.85, v, float(v[torch.from_numpy(graph.dangling)].sum()), dtype)


@pytest.mark.parametrize(("tol", "ends_in"), [(1e-3, torch.float32), (1e-10, torch.float64)])
def test_float32_gives_way_only_where_its_rounding_shows(tol, ends_in):
    rounds = rounds_of(document_graph(300), torch.float32)
    assert rounds.run(tol, 1000)[1]
    assert rounds._sent.dtype is ends_in


@pytest.mark.parametrize("tol", [1e-5, 1e-9])
@pytest.mark.parametrize("leaves", [5000, 300_000])
def test_a_row_of_any_length_is_summed_within_the_bound(leaves, tol):
    """The sum of 5000 float32 is off by more than 1e-5 here; 300 000 may be off by 2 %, which no bound can use."""
    result = solve_from_float32(star(leaves), tol=tol)
    assert result.converged
    assert np.abs(result.scores - star_ranks(leaves)).sum() <= result.error_bound <= tol


# ---- the layout of the kernels


def entries_of(graph: Graph) -> list[tuple[int, int, float]]:
    """What the layout holds, as (destination, source, share) of nodes."""
    cut = cut_into_slices(edges_on(graph, CPU))
    owner = torch.full((len(cut.sources),), -1)
    slice_of = torch.full((cut.num_sums,), -1)
    for number, (first, end) in enumerate(zip(cut.first_step.tolist(), cut.end_step.tolist(), strict=True)):
        rows = (number * BLOCK + torch.arange(BLOCK)).repeat(end - first)
        (slice_of if number < cut.long_slices else owner)[first * BLOCK : end * BLOCK] = rows
    assert len(set(cut.chunk_place.tolist())) == len(cut.chunk_place), "two chunks have one place"
    assert (cut.chunk_begin.diff() <= cut.longest_chunk).all()
    assert not len(cut.chunk_place) or (cut.end_step - cut.first_step)[: cut.long_slices].max() <= 1024
    for chunk, place in enumerate(cut.chunk_place.tolist()):
        owner[cut.chunk_begin[chunk] : cut.chunk_begin[chunk + 1]] = slice_of[place]
    going_on = np.bincount(graph.src, minlength=graph.num_nodes) if cut.shares is None else ~graph.dangling
    assert cut.out_degree[: graph.num_nodes].tolist() == going_on[cut.node.numpy()].tolist()
    filled = (cut.sources < len(cut.node)).nonzero()[:, 0]
    assert (owner[filled] < len(cut.node)).all() and (owner[filled] >= 0).all()
    shares = torch.ones(len(filled)) if cut.shares is None else cut.shares[filled]
    ends = cut.node[owner[filled]], cut.node[cut.sources[filled].long()], shares
    return sorted(zip(*(part.tolist() for part in ends), strict=True))


def edges_of(graph: Graph) -> list[tuple[int, int, float]]:
    same = graph.weights is None or (graph.num_edges > 0 and graph.weights.min() == graph.weights.max() > 0)
    shares = np.ones(graph.num_edges) if same else graph.probabilities
    return sorted(zip(graph.dst.tolist(), graph.src.tolist(), shares.tolist(), strict=True))


@given(graph=graphs(Graph.from_edges).filter(lambda g: g.num_nodes > 0))
def test_slices_hold_each_edge_once(graph):
    assert entries_of(graph) == edges_of(graph)


@st.composite
def graphs_with_long_rows(draw):
    """Rows of up to thousands of entries: in slices, in one chunk, in several."""
    n = draw(st.integers(2, 400))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 20_000))
    dst = (n * rng.random(count) ** draw(st.sampled_from([1, 3, 9]))).astype(np.int64)
    weights = rng.random(count) if draw(st.booleans()) else None
    return Graph(rng.integers(0, n, count), dst, n, weights)


def test_a_graph_of_long_rows_alone_has_no_other_slice():
    graph = Graph(np.arange(400) % 2, np.zeros(400, np.int64), 2)
    assert entries_of(graph) == edges_of(graph)


@settings(max_examples=15)
@given(graph=graphs_with_long_rows())
def test_slices_hold_each_edge_of_long_rows_once(graph):
    assert entries_of(graph) == edges_of(graph)


def test_the_chunks_of_a_giant_row_grow_so_that_its_sums_stay_few():
    graph = star(600_000)
    cut = cut_into_slices(edges_on(graph, CPU))
    assert cut.longest_chunk == 1024
    assert int(cut.end_step[0]) == math.ceil(600_000 / 1024)
    assert entries_of(graph) == edges_of(graph)


# ---- the kernels


def graphs_for_the_interpreter() -> dict[str, Graph]:
    """Few, as it is slow: rows in slices, in one chunk and in several; with and without weights; the corners."""
    rng = np.random.default_rng(0)
    dst = (150 * rng.random(4000) ** 3).astype(np.int64)
    src = rng.integers(0, 140, 4000)
    made = {"long rows": Graph(src, dst, 150), "long rows, weights": Graph(src, dst, 150, rng.random(4000))}
    for name in ("one node", "no edges", "star out of a hub", "weights that differ", "out-weights of one node 0"):
        edges = CORNERS[name]
        made[name] = Graph.from_edges(edges.src, edges.dst, edges.num_nodes, edges.weights)
    return made


def check_kernels_in_the_interpreter() -> None:
    """What the subprocess runs, in which Triton was told to interpret."""
    for name, graph in graphs_for_the_interpreter().items():
        n = graph.num_nodes
        for dtype in (torch.float64, torch.float32):
            for v in (np.full(n, 1 / n), np.arange(1, n + 1) / (n * (n + 1) / 2)):
                w = v[::-1].copy()

                def function(graph, v=v, w=w, dtype=dtype):
                    return solve_on_device(graph, CPU, "triton", 0.85, 1e-2, 9, v, w, v, start_in=dtype)

                check_error_bound(function, graph, tol=1e-2, personalization=v, dangling=w)
        print("held:", name)
    exact = solve_on_device(graph, CPU, "triton", 0.85, 1e-10, 200, v, v, v, start_in=torch.float32)
    assert exact.converged and np.abs(exact.scores - pagerank_reference(graph, personalization=v)).sum() <= 1e-10


@NEEDS_TRITON
def test_the_kernels_keep_their_bound_in_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__} as suite; suite.check_kernels_in_the_interpreter()"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton needs numpy < 2.4: https://github.com/triton-lang/triton/issues/9171")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held:") == len(graphs_for_the_interpreter())


POINTERS = {
    "add_chunks": "sources shares:*fp64 sent chunk_begin:*i64 chunk_place:*i64 sums:*fp64",
    "update_rows": "sources shares:*fp64 sums:*fp64 first_step:*i64 end_step:*i64 long_slices:i32 longest_chunk:i32 "
    "sent out_degree num_nodes:i32 factors:*fp64 teleport:*fp64 landing:*fp64 scores:*fp64 sent_next:*SENT "
    "totals:*fp64 parts:*fp64 num_slices:i32",
    "add_parts": "parts:*fp64 totals:*fp64 num_slices:i32",
}


@NEEDS_TRITON
@pytest.mark.parametrize("sent", ["fp32", "fp64"])
@pytest.mark.parametrize("name", POINTERS)
def test_the_kernels_compile_for_a_gpu_that_is_not_there(name, sent):
    """For compute capability 9.0; what the interpreter does not see, types above all."""
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton interprets: TRITON_INTERPRET is set")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pdlcheck.primitives.pagerank.device import kernels

    words = POINTERS[name].replace(" sent ", f" sent:*{sent} ").replace("*SENT", f"*{sent}").split()
    types = {word.partition(":")[0]: word.partition(":")[2] or "*i32" for word in words}
    constants = {
        "add_chunks": {"WEIGHTED": True, "LANES": 512},
        "update_rows": {"WEIGHTED": True, "UNIFORM": False, "BLOCK": BLOCK, "STEPS": 8, "GROUPS": 64},
        "add_parts": {"GROUPS": 64, "LANES": 256},
    }[name]
    source = ASTSource(getattr(kernels, name), types | dict.fromkeys(constants, "constexpr"), constants)
    options = {"num_warps": 2, "enable_fp_fusion": True}
    assert "cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


@NEEDS_TRITON
def test_the_kernels_refuse_a_device_that_is_not_cuda(subject):
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton interprets: TRITON_INTERPRET is set")
    with pytest.raises(ValueError, match=r"kernel='triton' needs device='cuda', got 'cpu'; use kernel='csr' there"):
        subject(([0, 1], [1, 0]), kernel="triton")


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed; without it an error names the cure")
def test_missing_triton_is_an_error_with_its_cure(subject):
    with pytest.raises(ImportError, match=r"kernel='triton' needs Triton .* or use kernel='csr'"):
        subject(([0, 1], [1, 0]), kernel="triton")


# ---- on CUDA


@pytest.mark.gpu
@each_kernel
@given(graph=graphs(Graph.from_edges), damping=DAMPING, tol=st.sampled_from([1e-2, 1e-8, 1e-11, 1e-17]))
def test_the_bound_holds_on_cuda(subject, kernel, graph, damping, tol):
    function = partial(subject, damping=damping, tol=tol, device="cuda", kernel=kernel)
    check_error_bound(function, graph, damping=damping, tol=tol)


@pytest.mark.gpu
@each_kernel
@given(case=graphs_with_vectors())
def test_all_vectors_are_honoured_on_cuda(subject, kernel, case):
    graph, v, w, start = case
    function = partial(subject, personalization=v, dangling=w, start=start, device="cuda", kernel=kernel)
    check_error_bound(function, graph, personalization=v, dangling=w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@each_kernel
@given(graph=graphs_with_long_rows(), tol=st.sampled_from([1e-3, 1e-10]))
def test_the_bound_holds_on_cuda_for_long_rows_from_either_precision(kernel, dtype, graph, tol):
    v = distribution("personalization", None, graph)

    def function(graph):
        return solve_on_device(graph, torch.device("cuda"), kernel, 0.85, tol, 1000, v, v, v, start_in=dtype)

    check_error_bound(function, graph, tol=tol)


@pytest.mark.gpu
@NEEDS_TRITON
def test_the_kernels_give_the_same_bits_each_time(subject):
    rng = np.random.default_rng(0)
    graph = Graph(rng.integers(0, 9_000, 2_000_000), rng.integers(0, 10_000, 2_000_000), 10_000)
    bits = {subject(graph, device="cuda", kernel="triton").scores.tobytes() for _ in range(3)}
    assert len(bits) == 1


@pytest.mark.gpu
@each_kernel
def test_a_large_graph_has_the_ranks_of_the_cpu(subject, kernel):
    """Ten million edges: float32 at first, and no recording."""
    rng = np.random.default_rng(0)
    graph = Graph(rng.integers(0, 900_000, 10_000_000), rng.integers(0, 1_000_000, 10_000_000), 1_000_000)
    for tol in (1e-6, 1e-9):
        result = subject(graph, tol=tol, device="cuda", kernel=kernel)
        assert result.converged
        assert np.abs(result.scores - pagerank(graph, tol=1e-11).scores).sum() <= tol + 1e-11


# ---- bad arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": "cusparse"}, "kernel must be 'auto', 'csr' or 'triton', got 'cusparse'"),
        ({"kernel": "csr", "method": "gauss-seidel"}, "method is 'gauss-seidel', which is for device='cpu'"),
    ],
    ids=["kernel", "method"],
)
def test_a_bad_choice_of_kernel_is_refused(subject, arguments, message):
    with pytest.raises(ValueError, match=message):
        subject(([0, 1], [1, 0]), **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named(subject):
    with pytest.raises(ValueError, match="device is 'cuda', but torch sees no CUDA device; use device='cpu'"):
        subject(([0, 1], [1, 0]), device="cuda")
