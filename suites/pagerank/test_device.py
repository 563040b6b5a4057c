"""PageRank on a device: the CSR rounds and the stop rule on any machine, everything else on CUDA."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pdlcheck.checks.graphs import CORNERS, graphs
from pdlcheck.checks.pagerank.scores import check_error_bound, check_pagerank
from pdlcheck.primitives.pagerank import Graph, document_graph, pagerank
from pdlcheck.primitives.pagerank.arguments import distribution
from pdlcheck.primitives.pagerank.device.csr import CsrMatrix, CsrSweep
from pdlcheck.primitives.pagerank.device.edges import edges_on
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
    """Solve with the CSR rounds, which start in float32 on a graph of any size."""
    if graph.num_nodes == 0:
        return Solution(np.zeros(0), 0, 0.0, True)
    v = distribution("personalization", None, graph)
    return solve_on_device(graph, CPU, "csr", damping, tol, max_iter, v, v, v, start_in=torch.float32)


def star(leaves: int) -> Graph:
    """Return a star: all leaves point to the hub, node 0, and the hub points to one of them."""
    return Graph(np.r_[1 : leaves + 1, 0], np.r_[np.zeros(leaves, np.int64), 1], leaves + 1)


def star_ranks(leaves: int, d: float = 0.85) -> np.ndarray:
    """Return the ranks of a star, computed by hand."""
    base = (1 - d) / (leaves + 1)
    ranks = np.full(leaves + 1, base)
    ranks[0] = base * (1 + leaves * d) / (1 - d * d)
    ranks[1] = base + d * ranks[0]
    return ranks


# ---- CSR rounds, on the CPU


@pytest.mark.if_subject_takes("kernel")
@given(graph=graphs(Graph.from_edges), damping=DAMPING, tol=st.sampled_from([1e-2, 1e-5, 1e-8, 1e-11, 1e-17]))
def test_the_bound_of_csr_rounds_holds_for_the_true_error(subject, graph, damping, tol):
    check_error_bound(partial(subject, damping=damping, tol=tol, kernel="csr"), graph, damping=damping, tol=tol)


@pytest.mark.if_subject_takes("kernel")
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


@pytest.mark.if_subject_takes("kernel", "start")
@given(case=graphs_with_vectors())
def test_csr_rounds_honour_all_vectors(subject, case):
    graph, v, w, start = case
    function = partial(subject, personalization=v, dangling=w, start=start, kernel="csr")
    check_pagerank(function, graph, personalization=v, dangling=w)
    check_error_bound(function, graph, personalization=v, dangling=w)


@pytest.mark.if_subject_takes("kernel")
@given(graph=graphs(Graph.from_edges), rounds=st.integers(1, 20))
def test_max_iter_stops_csr_rounds_with_a_bound_that_holds(subject, graph, rounds):
    function = partial(subject, max_iter=rounds, kernel="csr", tol=1e-12)
    check_error_bound(function, graph, tol=1e-12)
    assert function(graph).iterations <= rounds


@pytest.mark.if_subject_takes("kernel")
@pytest.mark.parametrize("degree", [3, 30])
def test_csr_rounds_on_more_nodes_than_one_sum_takes(subject, degree):
    """One node in ten is dangling, so that the mass of dangling nodes, a long sum, matters."""
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 2600, 2600 * degree), rng.integers(0, 2900, 2600 * degree)
    graph = Graph.from_edges(src, dst, 2900)
    check_error_bound(partial(subject, kernel="csr", tol=1e-11), graph, tol=1e-11)


@pytest.mark.if_subject_takes("kernel")
def test_csr_rounds_accept_edges_that_occur_twice_where_torch_checks_matrices(subject):
    graph = Graph.from_edges([0, 0, 0, 1], [1, 1, 2, 0], 3)
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        check_pagerank(partial(subject, kernel="csr"), graph)


@pytest.mark.parametrize("times", [1, 2, 7])
def test_a_csr_matrix_has_a_place_for_each_of_its_entries(times):
    """Only such a matrix is valid for cuSPARSE, and an edge that occurs twice is two entries."""
    graph = Graph.from_edges([0, 1, 1] * times, [1, 0, 1] * times, 2)
    matrix = CsrMatrix(edges_on(graph, CPU))
    rows, columns = matrix._of(torch.float64).shape
    assert columns == 2
    assert rows * columns >= matrix.num_edges == 3 * times
    assert matrix.times(torch.ones(2, dtype=torch.float64)).tolist() == [times, 2.0 * times]


# ---- the stop rule


@pytest.mark.if_subject_takes("kernel", "method")
def test_the_host_looks_every_eight_rounds(subject):
    graph = document_graph(300, mean_degree=6)
    rounds = [subject(graph, tol=10.0**-k, kernel="csr").iterations for k in range(1, 12)]
    assert {count % 8 for count in rounds} == {0}
    v = np.ones(300)  # an explicit vector, so the rounds start from it on the CPU too
    needed = [subject(graph, tol=10.0**-k, method="power", personalization=v).iterations for k in range(1, 12)]
    assert all(n <= count < n + 8 for n, count in zip(needed, rounds, strict=True))


@pytest.mark.if_subject_takes("kernel")
def test_rounds_end_where_only_rounding_is_left(subject):
    result = subject(document_graph(50), tol=1e-18, kernel="csr")
    assert not result.converged
    assert 1e-18 < result.error_bound < 1e-12
    assert result.iterations < 200


@given(graph=graphs(Graph.from_edges), damping=DAMPING, tol=st.sampled_from([1e-2, 1e-5, 1e-8, 1e-11]))
@example(graph=Graph([0, 1, 2, 3], [1, 0, 0, 0], 4), damping=0.95, tol=1e-5)  # float32 runs into a cycle
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


@pytest.mark.slow
@pytest.mark.parametrize("tol", [1e-5, 1e-9])
@pytest.mark.parametrize("leaves", [5000, 300_000])
def test_a_row_of_any_length_is_summed_within_the_bound(leaves, tol):
    """A float32 sum of 5000 is off by more than 1e-5 here; one of 300 000 may be off by 2 %, too much for any bound."""
    result = solve_from_float32(star(leaves), tol=tol)
    assert result.converged
    assert np.abs(result.scores - star_ranks(leaves)).sum() <= result.error_bound <= tol


# ---- on CUDA


@pytest.mark.if_subject_takes("device", "kernel")
@pytest.mark.gpu
@each_kernel
@given(graph=graphs(Graph.from_edges), damping=DAMPING, tol=st.sampled_from([1e-2, 1e-8, 1e-11, 1e-17]))
def test_the_bound_holds_on_cuda(subject, kernel, graph, damping, tol):
    function = partial(subject, damping=damping, tol=tol, device="cuda", kernel=kernel)
    check_error_bound(function, graph, damping=damping, tol=tol)


@pytest.mark.if_subject_takes("device", "kernel", "start")
@pytest.mark.gpu
@each_kernel
@given(case=graphs_with_vectors())
def test_all_vectors_are_honoured_on_cuda(subject, kernel, case):
    graph, v, w, start = case
    function = partial(subject, personalization=v, dangling=w, start=start, device="cuda", kernel=kernel)
    check_error_bound(function, graph, personalization=v, dangling=w)


@pytest.mark.if_subject_takes("device", "kernel")
@pytest.mark.gpu
@each_kernel
def test_a_large_graph_has_the_ranks_of_the_cpu(subject, kernel):
    """A graph of ten million edges starts in float32, and its rounds are not recorded."""
    rng = np.random.default_rng(0)
    graph = Graph(rng.integers(0, 900_000, 10_000_000), rng.integers(0, 1_000_000, 10_000_000), 1_000_000)
    for tol in (1e-6, 1e-9):
        result = subject(graph, tol=tol, device="cuda", kernel=kernel)
        assert result.converged
        assert np.abs(result.scores - pagerank(graph, tol=1e-11).scores).sum() <= tol + 1e-11


# ---- bad arguments


@pytest.mark.beyond_contract("error messages")
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


@pytest.mark.beyond_contract("error messages")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named(subject):
    with pytest.raises(ValueError, match="device is 'cuda', but torch sees no CUDA device; use device='cpu'"):
        subject(([0, 1], [1, 0]), device="cuda")
