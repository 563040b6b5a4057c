"""Ids of any size become numbers from 0, and keep their names."""

from __future__ import annotations

import numpy as np
import pytest

from pdlcheck.primitives.pagerank import Graph, pagerank
from pdlcheck.primitives.pagerank.files import numbering
from pdlcheck.primitives.pagerank.files.numbering import number_nodes
from pdlcheck.primitives.pagerank.node_ids import NodeIds
from pdlcheck.primitives.pagerank.ranks.arguments import _digest_of_names

EDGES = 150_000  # more than one thread's share, and than the first hash table holds


@pytest.mark.parametrize(
    ("span", "kind"),
    [(400_000, np.int32), (400_000, np.int64), (2**31 - 1, np.int32), (2**62, np.int64)],
    ids=["few int32", "few int64", "far int32", "far int64"],
)
def test_ids_are_numbered_in_their_order(span, kind):
    rng = np.random.default_rng(0)
    ends = [rng.integers(0, span, EDGES).astype(kind) for _ in range(2)]
    src, dst = (ids.copy() for ids in ends)
    nodes = np.unique(ends)
    found = number_nodes(src, dst, int(nodes[-1]), "a file")
    assert np.array_equal(found.array, nodes)
    assert np.array_equal(nodes[src], ends[0])
    assert np.array_equal(nodes[dst], ends[1])


@pytest.mark.parametrize("number", [63, 64, 65, 70_000])
def test_ids_without_gaps_stay_as_they_are(number):
    src = np.random.default_rng(0).permutation(number).astype(np.int32)
    dst = src[::-1].copy()
    before = src.copy()
    assert number_nodes(src, dst, number - 1, "a file") is None
    assert np.array_equal(src, before)
    dst[dst == 7] = 8
    src[src == 7] = 8
    assert list(number_nodes(src, dst, number - 1, "a file")) == [k for k in range(number) if k != 7]


def test_tables_that_cannot_fit_are_refused(monkeypatch):
    monkeypatch.setattr(numbering, "require_free_memory", refuse)
    for far in (1000, 2**40):
        ids = np.arange(EDGES) * (far if far > 1000 else 1)
        with pytest.raises(MemoryError, match="a file: numbering"):
            number_nodes(ids, ids.copy(), int(ids[-1]), "a file")


def refuse(what, nbytes, cure):
    raise MemoryError(what)


def test_ids_are_found_as_numbers_of_any_kind():
    ids = NodeIds(np.array([3, 7, 2**62]))
    assert [ids.place(node) for node in (7, 7.0, np.int32(7), 2**62)] == [1, 1, 1, 2]
    assert [ids.place(node) for node in (8, 7.5, "7", True, None, 2**70, float("nan"))] == [None] * 7
    assert (list(ids), 7 in ids, 8 in ids, list(ids[1:])) == ([3, 7, 2**62], True, False, [7, 2**62])
    with pytest.raises(ValueError, match="ids must ascend"):
        NodeIds(np.array([3, 3]))


def test_vectors_and_scores_go_by_the_ids_of_a_graph():
    graph = Graph([0, 1], [1, 0], 2, names=NodeIds(np.array([3, 7])))
    assert pagerank(graph, damping=0.0, personalization={7: 1.0}).top(2) == [(7, 1.0), (3, 0.0)]
    with pytest.raises(ValueError, match="personalization: 1 is not a node of the graph"):
        pagerank(graph, personalization={1: 1.0})
    with pytest.raises(ValueError, match="names must be 2 distinct names, one per node, got 3"):
        Graph([0, 1], [1, 0], 2, names=NodeIds(np.array([3, 7, 9])))


def test_ranks_compare_all_ids_not_what_is_printed_of_them():
    one, other = np.arange(0, 10_000, 2), np.arange(0, 10_000, 2)
    other[2500] += 1
    assert _digest_of_names(NodeIds(one)) == _digest_of_names(NodeIds(one.copy()))
    assert _digest_of_names(NodeIds(one)) != _digest_of_names(NodeIds(other))
