"""All versions of PageRank give the dense solution, for any precision and any node names."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings

from pdlcheck.checks.graphs import CORNERS, graph_and_relabelling, graphs
from pdlcheck.checks.pagerank.scores import (
    check_pagerank,
    check_pagerank_agreement,
    check_pagerank_relabelling,
    check_transition_matrix,
)
from pdlcheck.primitives.pagerank import (
    Graph,
    document_graph,
    pagerank,
    pagerank_reference,
    pagerank_v0,
    pagerank_v1,
    pagerank_v2,
    pagerank_v3,
)

from .cases import DAMPING, VERSIONS, each_primitive, each_version, left_over


@each_primitive
@given(graph=graphs(Graph.from_edges), damping=DAMPING)
def test_scores_are_the_dense_solution(subject, version, graph, damping):
    tol = left_over(version, damping)
    check_pagerank(partial(subject, damping=damping), graph, damping=damping, tol=tol)


@each_primitive
@pytest.mark.parametrize("corner", CORNERS)
def test_scores_of_a_named_graph_are_the_dense_solution(subject, version, corner):
    edges = CORNERS[corner]
    graph = Graph.from_edges(edges.src, edges.dst, edges.num_nodes, edges.weights)
    check_pagerank(subject, graph, tol=left_over(version, 0.85))


@pytest.mark.slow
@each_primitive
@given(case=graph_and_relabelling(Graph.from_edges))
def test_renaming_nodes_permutes_scores(subject, version, case):
    check_pagerank_relabelling(subject, *case, tol=left_over(version, 0.85))


@pytest.mark.slow
@pytest.mark.if_subject_takes("dtype")
@each_version
@given(graph=graphs(Graph.from_edges))
def test_float32_is_right_within_its_rounding(subject, version, graph):
    check_pagerank(partial(subject, dtype=torch.float32), graph, tol=left_over(version, 0.85))


@pytest.mark.slow
@pytest.mark.verifies("pagerank_v1")
@given(graph=graphs(Graph.from_edges), damping=DAMPING)
def test_all_versions_agree(graph, damping):
    named = {name: partial(f, damping=damping) for name, f in VERSIONS.items()}
    named["pagerank"] = partial(pagerank, damping=damping, tol=1e-12)
    check_pagerank_agreement(named, graph, damping=damping, tol=max(1e-12, left_over("pagerank_v1", damping)))


@pytest.mark.if_subject_takes("layout")
@pytest.mark.parametrize("version", ["pagerank_v1"])
@pytest.mark.verifies("pagerank_v1")
@given(graph=graphs(Graph.from_edges))
def test_the_published_coo_layout_gives_the_same_scores(subject, version, graph):
    check_pagerank(partial(subject, layout="coo"), graph, tol=left_over(version, 0.85))


@pytest.mark.if_subject_takes("fold")
@pytest.mark.verifies("pagerank_v3")
@given(graph=graphs(Graph.from_edges))
def test_the_published_fold_by_a_matrix_product_gives_the_same_scores(subject, graph):
    check_pagerank(partial(subject, fold="matmul"), graph, tol=left_over("pagerank_v3", 0.85))


@pytest.mark.if_subject_takes("fold")
@pytest.mark.verifies("transition_matrix")
@pytest.mark.parametrize("fold", ["scale", "matmul"])
@given(graph=graphs(Graph.from_edges))
def test_columns_of_the_transition_matrix_sum_to_1(subject, fold, graph):
    check_transition_matrix(partial(subject, fold=fold), graph)


@each_version
def test_scores_of_the_published_graph_are_the_dense_solution(subject, version):
    check_pagerank(subject, document_graph(300, mean_degree=15), tol=left_over(version, 0.85))


@pytest.mark.if_subject_takes("device", "dtype")
@each_version
@pytest.mark.gpu
def test_scores_on_cuda_are_the_dense_solution(subject, version):
    graph = document_graph(300, mean_degree=15)
    if version == "pagerank_v0" and not dgl_has_cuda():
        pytest.skip("this DGL is built for the CPU; pip has none for CUDA that imports with this torch")
    for dtype in (torch.float64, torch.float32):
        check_pagerank(partial(subject, device="cuda", dtype=dtype), graph, tol=left_over(version, 0.85))


def dgl_has_cuda() -> bool:
    try:
        pagerank_v0(([0, 1], [1, 0]), device="cuda", iterations=1)
    except ValueError:
        return False
    return True


def every_pair(device: str) -> dict[str, partial]:
    """Return each version as published and as used, in both precisions."""
    layouts = {"v1": partial(pagerank_v1, layout="csr"), "v1 coo": partial(pagerank_v1, layout="coo")}
    folds = {"v3": partial(pagerank_v3, fold="scale"), "v3 matmul": partial(pagerank_v3, fold="matmul")}
    named = {**layouts, "v2": pagerank_v2, **folds}
    if "pagerank_v0" in VERSIONS and (device == "cpu" or dgl_has_cuda()):
        named["v0"] = pagerank_v0
    return {
        f"{name} {device} {str(dtype)[6:]}": partial(version, device=device, dtype=dtype)
        for name, version in named.items()
        for dtype in (torch.float32, torch.float64)
    }


@pytest.mark.slow
@pytest.mark.verifies("pagerank_v1")
@settings(max_examples=10)
@given(graph=graphs(Graph.from_edges))
def test_every_version_in_either_precision_has_the_same_ranks(graph):
    named = {**every_pair("cpu"), "exact": pagerank_reference}
    check_pagerank_agreement(named, graph, tol=left_over("pagerank_v1", 0.85))


@pytest.mark.verifies("pagerank_v1")
@pytest.mark.gpu
@given(graph=graphs(Graph.from_edges))
def test_every_version_on_either_device_in_either_precision_has_the_same_ranks(graph):
    named = {**every_pair("cpu"), **every_pair("cuda"), "exact": pagerank_reference}
    check_pagerank_agreement(named, graph, tol=left_over("pagerank_v1", 0.85))
