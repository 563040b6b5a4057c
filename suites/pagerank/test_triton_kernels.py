"""The Triton kernels of PageRank and their layout: edge by edge, in Triton's interpreter, compiled, and on CUDA."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlcheck.checks.graphs import CORNERS, graphs
from pdlcheck.checks.pagerank.scores import check_error_bound
from pdlcheck.primitives.pagerank import Graph, pagerank_reference
from pdlcheck.primitives.pagerank.arguments import distribution
from pdlcheck.primitives.pagerank.device.edges import edges_on
from pdlcheck.primitives.pagerank.device.slices import BLOCK, cut_into_slices
from pdlcheck.primitives.pagerank.device.solver import solve_on_device

pytestmark = pytest.mark.verifies("pagerank")

CPU = torch.device("cpu")
NEEDS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton, which comes with torch for CUDA; else: pip install triton"
)
each_kernel = pytest.mark.parametrize("kernel", ["csr", pytest.param("triton", marks=NEEDS_TRITON)])


# ---- the layout


def entries_of(graph: Graph) -> list[tuple[int, int, float]]:
    """Return the entries of the layout as (destination, source, share) of nodes."""
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
    assert (owner[filled] < len(cut.node)).all()
    assert (owner[filled] >= 0).all()
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
    """Draw graphs with rows of up to thousands of entries: in slices, in one chunk, in several."""
    n = draw(st.integers(2, 400))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = 1000 * draw(st.integers(1, 20))
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
    leaves = 600_000  # all point to node 0, which points to one of them
    graph = Graph(np.r_[1 : leaves + 1, 0], np.r_[np.zeros(leaves, np.int64), 1], leaves + 1)
    cut = cut_into_slices(edges_on(graph, CPU))
    assert cut.longest_chunk == 1024
    assert int(cut.end_step[0]) == math.ceil(leaves / 1024)
    assert entries_of(graph) == edges_of(graph)


# ---- the kernels


def graphs_for_the_interpreter() -> dict[str, Graph]:
    """Return a few graphs, because the interpreter is slow.

    They have rows in slices, in one chunk and in several, with and without weights, and the corner cases.
    """
    rng = np.random.default_rng(0)
    dst = (150 * rng.random(4000) ** 3).astype(np.int64)
    src = rng.integers(0, 140, 4000)
    made = {"long rows": Graph(src, dst, 150), "long rows, weights": Graph(src, dst, 150, rng.random(4000))}
    made["long rows alone"] = Graph(np.arange(400) % 2, np.zeros(400, np.int64), 2)
    names = "one node", "no edges", "weights that differ", "out-weights of one node 0", "two parts and an isolated node"
    for name in names:
        edges = CORNERS[name]
        made[name] = Graph.from_edges(edges.src, edges.dst, edges.num_nodes, edges.weights)
    return made


def check_kernels_in_the_interpreter() -> None:
    """Check the kernels in a subprocess that uses Triton's interpreter."""
    for name, graph in graphs_for_the_interpreter().items():
        n = graph.num_nodes
        for dtype in (torch.float64, torch.float32):
            for v in (np.full(n, 1 / n), np.arange(1, n + 1) / (n * (n + 1) / 2)):
                w = v[::-1].copy()

                def function(graph, v=v, w=w, dtype=dtype):
                    return solve_on_device(graph, CPU, "triton", 0.85, 1e-2, 9, v, w, v, start_in=dtype)

                check_error_bound(function, graph, tol=1e-2, personalization=v, dangling=w)
        print("held:", name)
    for v in (np.full(n, 1 / n), np.arange(1, n + 1) / (n * (n + 1) / 2)):
        exact = solve_on_device(graph, CPU, "triton", 0.85, 1e-10, 200, v, v, v, start_in=torch.float32)
        assert exact.converged
        assert np.abs(exact.scores - pagerank_reference(graph, personalization=v)).sum() <= 1e-10


@NEEDS_TRITON
def test_the_kernels_keep_their_bound_in_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__} as suite; suite.check_kernels_in_the_interpreter()"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip(
            "the interpreter of this Triton needs numpy < 2.4: https://github.com/triton-lang/triton/issues/9171"
        )
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
@pytest.mark.filterwarnings("ignore:AnnAssign:DeprecationWarning")  # a warning inside Triton on Python 3.13
@pytest.mark.parametrize("sent", ["fp32", "fp64"])
@pytest.mark.parametrize("name", POINTERS)
def test_the_kernels_compile_for_a_gpu_that_is_not_there(name, sent):
    """The target is compute capability 9.0; compiling checks what the interpreter does not, above all types."""
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


@pytest.mark.beyond_contract("error messages")
@NEEDS_TRITON
def test_the_kernels_refuse_a_device_that_is_not_cuda(subject):
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton interprets: TRITON_INTERPRET is set")
    with pytest.raises(ValueError, match=r"kernel='triton' needs device='cuda', got 'cpu'; use kernel='csr' there"):
        subject(([0, 1], [1, 0]), kernel="triton")


@pytest.mark.beyond_contract("error messages")
@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed; without it an error names the cure")
def test_missing_triton_is_an_error_with_its_cure(subject):
    with pytest.raises(ImportError, match=r"kernel='triton' needs Triton .* or use kernel='csr'"):
        subject(([0, 1], [1, 0]), kernel="triton")


# ---- on CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@each_kernel
@given(graph=graphs_with_long_rows(), tol=st.sampled_from([1e-3, 1e-10]))
def test_the_bound_holds_on_cuda_for_long_rows_from_either_precision(kernel, dtype, graph, tol):
    v = distribution("personalization", None, graph)

    def function(graph):
        return solve_on_device(graph, torch.device("cuda"), kernel, 0.85, tol, 1000, v, v, v, start_in=dtype)

    check_error_bound(function, graph, tol=tol)


@pytest.mark.if_subject_takes("device", "kernel")
@pytest.mark.gpu
@NEEDS_TRITON
def test_the_kernels_give_the_same_bits_each_time(subject):
    rng = np.random.default_rng(0)
    graph = Graph(rng.integers(0, 9_000, 2_000_000), rng.integers(0, 10_000, 2_000_000), 10_000)
    bits = {subject(graph, device="cuda", kernel="triton").scores.tobytes() for _ in range(3)}
    assert len(bits) == 1
