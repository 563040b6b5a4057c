"""The graphs that the package ships, that it derives from installed packages, and that it draws from a seed."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from pdlcheck.checks.pagerank.scores import check_pagerank
from pdlcheck.primitives.pagerank import Graph, include_graph, rmat, torch_headers, uniform, wordnet_pointers
from pdlcheck.primitives.pagerank.datasets import pack

pytestmark = pytest.mark.verifies("pagerank")


def same(one: Graph, other: Graph) -> bool:
    return np.array_equal(one.src, other.src) and np.array_equal(one.dst, other.dst)


# ---- WordNet


@pytest.fixture(scope="module")
def wordnet():
    return wordnet_pointers()


def test_wordnet_is_the_pinned_one(wordnet):
    assert (wordnet.num_nodes, wordnet.num_edges, int(wordnet.dangling.sum())) == (117_659, 377_592, 1009)
    assert len(np.unique(wordnet.src.astype(np.int64) * wordnet.num_nodes + wordnet.dst)) == 361_647
    assert int((wordnet.src == wordnet.dst).sum()) == 19
    dog = wordnet.names.index("dog.n.01")
    targets = {wordnet.names[i] for i in wordnet.dst[wordnet.src == dog]}
    assert {"canine.n.02", "domestic_animal.n.01", "puppy.n.01", "poodle.n.01"} <= targets


def test_a_pointer_of_wordnet_has_its_inverse_where_it_is_a_hypernym(wordnet):
    """Each synset points to its hypernyms and they point back: entity.n.01 is above all others."""
    top = wordnet.names.index("entity.n.01")
    assert set(wordnet.dst[wordnet.src == top]) == set(wordnet.src[wordnet.dst == top])


def test_the_licence_lies_beside_the_data_of_wordnet():
    text = files("pdlcheck.primitives.pagerank.datasets").joinpath("wordnet_3_0.LICENSE").read_text()
    assert text.startswith("This software and database is being provided to you, the LICENSEE, by")
    assert "WordNet 3.0 Copyright 2006 by Princeton University.  All rights reserved." in text
    assert 'THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS"' in text


def test_wordnet_is_ranked(subject, wordnet):
    check_pagerank(partial(subject, tol=1e-10), wordnet, tol=1e-10)


def test_a_packed_graph_keeps_each_edge():
    graph = Graph(np.array([2, 0, 0, 2, 2]), np.array([1, 3, 3, 0, 2]), 4, names=tuple("abcd"))
    packed = pack(graph)
    assert packed["out_degree"].tolist() == [2, 0, 3, 0]
    assert packed["dst_gaps"].tolist() == [3, 0, 0, 1, 1]
    assert packed["names"].tobytes() == b"a\nb\nc\nd"


# ---- headers


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    for name, text in {
        "a.h": '#include "b.h"\n#include "sub/c.h"\n#include <b.h>\n// #include <sub/c.h>\n#include <missing.h>\n',
        "b.h": "#pragma once\n#if 1\n # include <sub/c.h>\n#endif\n",
        "sub/b.h": "",
        "sub/c.h": '#include "b.h"\n#include "../a.h"\n#include <b.h>\n',
        "notes.txt": '#include "a.h"\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_an_include_is_an_edge_to_the_file_that_a_compiler_would_take(headers):
    graph = include_graph(headers, [headers])
    assert graph.names == ("a.h", "b.h", "sub/b.h", "sub/c.h")
    a, b, sub_b, c = range(4)
    edges = [(a, b), (a, c), (a, b), (b, c), (c, sub_b), (c, a), (c, b)]
    assert list(zip(graph.src.tolist(), graph.dst.tolist(), strict=True)) == edges


def test_a_folder_without_headers_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no header; they end in \.cuh, \.h"):
        include_graph(tmp_path)


def test_the_headers_of_torch_are_ranked(subject):
    graph = torch_headers()
    assert graph.num_nodes > 5000
    assert graph.num_edges > 3 * graph.num_nodes
    check_pagerank(subject, graph)
    macros = graph.names.index("c10/macros/Macros.h")
    assert graph.names.index("c10/util/Exception.h") in graph.src[graph.dst == macros]


# ---- random graphs


@pytest.mark.parametrize("make", [uniform, rmat])
def test_a_seed_makes_one_graph(make):
    arguments = (4096, 100_000) if make is uniform else (12, 100_000)
    one = make(*arguments, seed=3)
    assert (one.num_nodes, one.num_edges) == (4096, 100_000)
    assert same(one, make(*arguments, seed=3))
    assert not same(one, make(*arguments, seed=4))


def test_uniform_has_the_dangling_nodes_asked_for_and_even_degrees():
    graph = uniform(2000, 100_000, dangling=0.3, seed=1)
    assert int(graph.dangling.sum()) == 600
    senders = np.bincount(graph.src, minlength=2000)[~graph.dangling]
    receivers = np.bincount(graph.dst, minlength=2000)
    for degrees, mean in ((senders, 100_000 / 1400), (receivers, 50)):  # Poisson: variance = mean
        assert degrees.mean() == pytest.approx(mean)
        assert degrees.var() == pytest.approx(mean, rel=0.25)
    ids = np.flatnonzero(graph.dangling)
    assert 700 < ids.mean() < 1300, "dangling nodes are spread over the ids"
    assert not (np.diff(graph.src) >= 0).all(), "edges lie in no order"


def test_rmat_fills_the_quadrants_with_their_probabilities():
    """With one cut the matrix is 2 x 2; ids are shuffled, so either diagonal may be the first."""
    graph = rmat(1, 100_000, a=0.6, b=0.25, c=0.1, seed=5)
    counts = np.zeros((2, 2))
    np.add.at(counts, (graph.src, graph.dst), 1 / graph.num_edges)
    if counts[0, 0] < counts[1, 1]:
        counts = counts[::-1, ::-1]
    assert counts.round(2).tolist() == pytest.approx(np.array([[0.6, 0.25], [0.1, 0.05]]), abs=0.011)


def test_rmat_crowds_its_edges_on_few_nodes_whatever_their_ids():
    graph = rmat(14, 262_144, seed=2)
    into = np.bincount(graph.dst, minlength=graph.num_nodes)
    assert into.max() > 50 * into.mean()
    assert 0.3 < graph.dangling.mean() < 0.6
    half = graph.num_nodes // 2
    assert 0.4 < into[:half].sum() / graph.num_edges < 0.6, "hubs are spread over the ids"


BAD = {
    "uniform nodes": (lambda: uniform(0), "num_nodes must be 1 or more, got 0"),
    "uniform edges": (lambda: uniform(3, -1), "num_edges must be 0 or more, got -1"),
    "uniform dangling": (lambda: uniform(3, 3, dangling=1), r"dangling must be in \[0, 1\).* got 1"),
    "rmat scale": (lambda: rmat(0, 5), r"scale must be in \[1, 40\].* got 0"),
    "rmat edges": (lambda: rmat(3, -1), "num_edges must be 0 or more, got -1"),
    "rmat a": (lambda: rmat(3, 5, a=0.9), "probabilities with a sum of 1 at most, got 0.9, 0.19, 0.19"),
    "rmat b": (lambda: rmat(3, 5, b=-0.1), "probabilities with a sum of 1 at most, got 0.57, -0.1, 0.19"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_refused(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [partial(uniform, 512, 8000), partial(rmat, 9, 8000)], ids=["uniform", "rmat"])
def test_random_graphs_are_ranked(subject, make):
    check_pagerank(subject, make(seed=7))
