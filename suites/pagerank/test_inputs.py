"""Files of edges as sources of a graph, right ones and wrong ones."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from pdlcheck.checks.graphs import graphs
from pdlcheck.primitives.pagerank import Graph, as_graph, pagerank
from pdlcheck.primitives.pagerank.files.columns import wide_enough

NEEDS_PYARROW = pytest.mark.skipif(
    find_spec("pyarrow") is None,
    reason="reading .parquet needs pyarrow, which is missing: pip install 'pdlcheck[parquet]'",
)
sevenths = st.integers(0, 10**6).map(lambda k: k / 7e3)  # needs all 17 digits
weights_of_files = sevenths | st.floats(0, 1e308).map(abs)  # no -0.0


# ---- files


@st.composite
def lines_of(draw, graph):
    """Draw lines of text for a graph, as people and programs write them."""
    separator = draw(st.sampled_from([" ", "\t", ",", " , ", "  \t", ", "]))
    end = draw(st.sampled_from(["\n", "\r\n", " \n"]))
    lines = []
    for e in range(graph.num_edges):
        fields = [str(graph.src[e]), str(graph.dst[e])]
        fields += [] if graph.weights is None else [repr(float(graph.weights[e]))]
        lines.append(draw(st.sampled_from(["", " "])) + separator.join(fields))
        lines += draw(st.lists(st.sampled_from(["", "# 1 2", "% what is this", "  # ü"]), max_size=1))
    text = end.join([draw(st.sampled_from(["# src dst", ""])), *lines])
    return ("\ufeff" if draw(st.booleans()) else "") + text + (end if draw(st.booleans()) else "")


@st.composite
def graphs_of_files(draw):
    graph = draw(graphs(Graph.from_edges, weighted=False))
    if graph.num_edges == 0 or draw(st.booleans()):
        return graph
    weights = draw(st.lists(weights_of_files, min_size=graph.num_edges, max_size=graph.num_edges))
    return Graph(graph.src, graph.dst, graph.num_nodes, np.array(weights))


def ids_in(graph):
    """Return the ids of both ends of all edges; nodes with names are identified by them."""
    ids = range(graph.num_nodes) if graph.names is None else list(graph.names)
    return [ids[u] for u in graph.src.tolist()], [ids[v] for v in graph.dst.tolist()]


def same(found, graph):
    """Check that both graphs have the same edges in the same order; missing weights count as 1."""
    assert ids_in(found) == ids_in(graph)
    assert found.num_nodes == graph.num_nodes
    ones = np.ones(graph.num_edges)
    for one, other in [(found.weights, graph.weights)]:
        assert (ones if one is None else one).tolist() == (ones if other is None else other).tolist()


@pytest.mark.slow
@pytest.mark.verifies("read_edges")
@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
@given(data=st.data(), graph=graphs_of_files())
def test_a_text_file_is_read_as_it_was_written(subject, suffix, data, graph):
    text = data.draw(lines_of(graph)).encode()
    with TemporaryDirectory() as folder:
        path = Path(folder, f"edges.{suffix}")
        path.write_bytes(gzip.compress(text) if suffix == "txt.gz" else text)
        weights = {} if graph.weights is None else {"weights": True}
        if graph.num_edges == 0:
            nothing = "is empty" if path.stat().st_size == 0 else "holds no edge"
            with pytest.raises(ValueError, match=nothing):
                subject(path)
            return
        same(subject(path, num_nodes=graph.num_nodes, **weights), graph)
        found = subject(path, **weights)
        assert ids_in(found) == ids_in(graph)
        assert found.num_nodes == len({*graph.src.tolist(), *graph.dst.tolist()})


@pytest.mark.slow
@pytest.mark.verifies("read_edges")
@given(
    weights=st.lists(weights_of_files, min_size=10, max_size=40),
    form=st.sampled_from(["{!r}", "{:.3e}", "{:.16E}", "{:.40e}", "+{:e}", "{:.400f}"]),
)
def test_a_decimal_weight_is_the_nearest_float64(subject, weights, form):
    with TemporaryDirectory() as folder:
        path = Path(folder, "edges")
        texts = [form.format(weight) for weight in weights]
        path.write_text("".join(f"0 1 {text}\n" for text in texts))
        assert subject(path, weights=True).weights.tolist() == [float(text) for text in texts]


@pytest.mark.verifies("read_edges")
def test_17_digits_take_one_rounding_not_two(subject, tmp_path):
    texts = ["0.009571428571428571", "0.009714285714285713", "0.010142857142857143"]
    (tmp_path / "edges").write_text("".join(f"0 1 {text}\n" for text in texts))
    assert subject(tmp_path / "edges").weights.tolist() == [float(text) for text in texts]


@pytest.mark.verifies("read_edges")
@given(
    ids=st.lists(st.integers(0, 12) | st.integers(0, 2**63 - 1), min_size=2, max_size=30), gap=st.integers(1, 10**12)
)
def test_the_nodes_are_those_that_have_an_edge(subject, ids, gap):
    """Ids may have any size: a table numbers small ranges, a hash table the others."""
    ids = [*ids[: len(ids) // 2 * 2], 0, gap]
    with TemporaryDirectory() as folder:
        path = Path(folder, "edges")
        path.write_text("".join(f"{u} {v}\n" for u, v in zip(ids[::2], ids[1::2], strict=True)))
        found = subject(path)
    assert ids_in(found) == (ids[::2], ids[1::2])
    assert list(range(found.num_nodes) if found.names is None else found.names) == sorted(set(ids))


@pytest.mark.verifies("read_edges")
@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_ids_in_npz_may_be_unsigned(subject, kind, tmp_path):
    np.savez(tmp_path / "e.npz", src=np.array([0, 1], kind), dst=np.array([1, 2], kind))
    assert subject(tmp_path / "e.npz").dst.tolist() == [1, 2]


@pytest.mark.verifies("read_edges")
@given(graph=graphs_of_files())
def test_arrays_in_npz_are_read_as_they_were_written(subject, graph):
    with TemporaryDirectory() as folder:
        path = Path(folder, "edges.npz")
        weights = {} if graph.weights is None else {"weights": graph.weights}
        np.savez(path, src=graph.src, dst=graph.dst, num_nodes=graph.num_nodes, **weights)
        same(subject(path), graph)
        size = (graph.num_nodes, graph.num_nodes)
        values = np.ones(graph.num_edges) if graph.weights is None else graph.weights
        sp.save_npz(path, sp.coo_array((values, (graph.src, graph.dst)), shape=size))
        same(subject(path), graph)


@NEEDS_PYARROW
@pytest.mark.verifies("read_edges")
@given(graph=graphs_of_files())
def test_columns_of_parquet_are_read_as_they_were_written(subject, graph):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"when": np.zeros(graph.num_edges), "src": graph.src, "dst": graph.dst}
    columns |= {} if graph.weights is None else {"weight": graph.weights}
    with TemporaryDirectory() as folder:
        path = Path(folder, "edges.parquet")
        pq.write_table(pa.table(columns), path)
        same(subject(path, num_nodes=graph.num_nodes), graph)
        if graph.num_edges:
            assert ids_in(subject(path)) == ids_in(graph)


EDGES = 900_000  # three blocks of text


@pytest.fixture(scope="module")
def long_text():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 100_000, (EDGES, 2))
    return ids, "# a comment\n" + "".join(f"{u}\t{v}\n" for u, v in ids.tolist())


@pytest.mark.if_subject_takes("progress")
@pytest.mark.verifies("read_edges")
@pytest.mark.parametrize("suffix", ["txt", "gz"])
def test_a_file_of_several_blocks_is_read_in_order_with_progress(subject, tmp_path, long_text, suffix):
    ids, text = long_text
    path = tmp_path / f"edges.{suffix}"
    path.write_bytes(gzip.compress(text.encode(), 1) if suffix == "gz" else text.encode())
    told = []
    graph = subject(path, progress=lambda done, total: told.append((done, total)))
    nodes = np.unique(ids)
    assert np.array_equal(nodes[graph.src], ids[:, 0])
    assert np.array_equal(nodes[graph.dst], ids[:, 1])
    size = path.stat().st_size
    assert len(told) >= 3
    assert told == sorted(told)
    assert told[-1] == (size, size)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("read_edges")
def test_a_wrong_line_far_into_a_file_is_named(subject, tmp_path, long_text):
    path = tmp_path / "edges.tsv"
    path.write_text(long_text[1] + "1 x\n" + "7 7\n" * 1000)
    with pytest.raises(ValueError, match=rf"edges.tsv:{EDGES + 2}: this is not a number; .* the line is '1 x'"):
        subject(path)


PACKS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.verifies("read_edges")
@pytest.mark.parametrize("kind", PACKS)
@pytest.mark.parametrize("name", ["e.txt", "e.bz2", "edges"])
def test_a_packed_file_is_unpacked_whatever_its_name(subject, tmp_path, kind, name):
    (tmp_path / name).write_bytes(PACKS[kind](b"0 1\n1 0\n"))
    assert subject(tmp_path / name).num_edges == 2


UNREADABLE = {
    "UTF-16": (lambda text: text.decode().encode("utf-16"), "is text in UTF-16, .*; convert it to UTF-8 with iconv"),
    "zip": (lambda text: b"PK\x03\x04" + text, "is a zip archive, .*; unpack it with unzip"),
    "tar": (lambda text: b"name".ljust(257, b"\0") + b"ustar" + text, "is a tar archive; unpack it with tar -xf"),
    "zeros": (lambda text: text + b"\0", "is no text: byte 8 is 0; give the file of edges, or pass --format"),
}


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("read_edges")
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("name", ["e.txt", "edges"])
def test_what_is_no_text_is_refused_as_such_and_not_for_its_first_line(subject, tmp_path, kind, name):
    make, message = UNREADABLE[kind]
    path = tmp_path / name
    path.write_bytes(make(b"0 1\n1 0\n"))
    with pytest.raises(ValueError, match=f"{name} {message}"):
        subject(path)
    path.write_bytes(b"0 1\n1 0\n")
    assert subject(path).num_edges == 2


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("read_edges")
def test_too_many_nodes_are_refused_where_they_are_asked_for(subject, tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text(f"0 1\n{10**15} 0\n")
    with pytest.raises(MemoryError, match=rf"edges.txt: ranking 2 edges between {10**15 + 1} nodes needs"):
        subject(path, num_nodes=10**15 + 1)
    assert subject(path).num_nodes == 3


@pytest.mark.verifies("read_edges")
def test_columns_are_widened_where_an_id_is_beyond_int32():
    ids = np.array([0, 7], np.int32)
    assert wide_enough(ids, 2**31 - 1) is ids
    assert wide_enough(ids, 2**31).dtype == np.int64
    assert wide_enough(ids, 2**31).tolist() == [0, 7]


NOT_A_NUMBER = "this is not a number; the ids of the first edge are whole numbers"
NO_WEIGHT = "a weight is not a decimal number"
BAD_LINES = {
    "word": ("0 1\nalice bob\n", rf"e.txt:2: {NOT_A_NUMBER}.*begin a comment with # or %.*--names.*'alice bob'"),
    "fraction": ("0 1\n\n1.5 2\n", rf"e.txt:3: {NOT_A_NUMBER}"),
    "hexadecimal": ("16 1\n0x10 1\n", rf"e.txt:2: {NOT_A_NUMBER}"),
    "second id": ("0 1\n0 1b\n", rf"e.txt:2: {NOT_A_NUMBER}"),
    "NaN": ("0 1 .5\n0 1 nan\n", rf"e.txt:2: {NO_WEIGHT}"),
    "infinite": ("0 1 .5\n0 1 inf\n", rf"e.txt:2: {NO_WEIGHT}"),
    "two points": ("0 1 .5\n0 1 1.2.3\n", rf"e.txt:2: {NO_WEIGHT}"),
    "no exponent": ("0 1 .5\n0 1 1e\n", rf"e.txt:2: {NO_WEIGHT}"),
    "only a sign": ("0 1 .5\n0 1 -\n", rf"e.txt:2: {NO_WEIGHT}"),
    "truncated": ("0 1\n12", "e.txt:2: an edge needs two ids, here is one; complete the line, .* be truncated"),
    "truncated at a comma": ("0,1\n12,", "e.txt:2: a node id is empty; fill it, the file may"),
    "empty field": ("0,1\n0,,1\n", "e.txt:2: a field between commas is empty"),
    "empty field among numbers": ("0,1\n1,2\n0,,1\n", "e.txt:3: a field between commas is empty"),
    "leading comma": ("1,1\n,1\n", "e.txt:2: a node id is empty"),
    "negative": ("0 1\n# -1 2\n3 -2\n", "e.txt:3: a node id is negative; .* pass --names .*'3 -2'"),
    "beyond int64": ("0 9223372036854775808\n", r"e.txt:1: a node id is beyond 2\*\*63 - 1"),
    "far beyond int64": ("0 123456789012345678901234567890\n", "e.txt:1: a node id is beyond"),
    "weight missing": ("0 1 2.5\n1 2\n", "e.txt:2: this line has fewer fields than the first edge"),
    "weight more": ("0 1\n1 2 3\n", "e.txt:2: this line has more fields than the first edge"),
    "negative weight": ("0 1 .5\n1 2 -0.5\n", "e.txt:2: a weight is negative; it must be 0 or more"),
    "weight too large": ("src dst w\n1 2 1\n1 2 1e309\n9 9 x\n", "e.txt:3: a weight is beyond 1.8e308.*'1 2 1e309'"),
    "matrix market": ("%%MatrixMarket matrix\n2 2 1\n1 2 1\n", "e.txt: its first line must be `%%MatrixMarket matrix"),
    "one endless line": ("1" * (9 << 20), "e.txt: its first 4194304 bytes hold no edge; an edge is a line"),
    "an endless line later": ("0 1\n" + "1" * (9 << 20), "e.txt has a line of more than 4194304 bytes"),
    "a long wrong line": ("0 1\n" + "x" * 1000 + "\n", "'x{60}'[.]{3}$"),
}  # fmt: skip


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("read_edges")
@pytest.mark.parametrize("case", BAD_LINES)
def test_a_wrong_line_is_named_with_file_number_and_cure(subject, tmp_path, case):
    text, message = BAD_LINES[case]
    (tmp_path / "e.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        subject(tmp_path / "e.txt")


BAD_ARRAYS = {
    "no dst": ({"src": [0]}, ValueError, "e.npz: it must hold arrays src and dst, it holds src"),
    "fractions": ({"src": [0.5], "dst": [1.0]}, TypeError, "e.npz: src must hold integers"),
    "half names": ({"src": ["a"], "dst": [1]}, TypeError, "e.npz: src must hold integers"),
    "infinite": ({"src": [np.inf], "dst": [1.0]}, TypeError, "e.npz: src must hold integers"),
    "unsigned": ({"src": np.array([2**64 - 1], np.uint64), "dst": [1]}, ValueError, "e.npz: src holds 184467"),
    "one number": ({"src": 0, "dst": [1]}, ValueError, r"e.npz: src must be one-dimensional.* got shape \(\)"),
    "num_nodes": ({"src": [0], "dst": [1], "num_nodes": "3"}, TypeError, "e.npz: num_nodes must be one whole number"),
    "complex": ({"src": [0], "dst": [1], "weights": [1j]}, TypeError, "e.npz: weights must hold real numbers"),
    "half a matrix": ({"format": "csr", "shape": [3, 3]}, ValueError, "e.npz: it cannot be unpacked"),
    "negative": ({"src": [0], "dst": [-1]}, ValueError, "e.npz: dst holds -1 at 0, ids must be 0 or more"),
    "empty": ({"src": [], "dst": []}, ValueError, "e.npz: it holds no edge"),
    "above num_nodes": ({"src": [0, 5], "dst": [1, 1], "num_nodes": 3}, ValueError, "e.npz: src holds 5 at 1"),
    "lengths": ({"src": [0, 1], "dst": [1]}, ValueError, "e.npz: src and dst must have one id per edge"),
    "weight": ({"src": [0], "dst": [1], "weight": [2.0]}, ValueError, "e.npz: .* from array weights, it holds weight;"),
    "weights of words": ({"src": [0], "dst": [1], "weights": ["a"]}, ValueError, "e.npz: weights must hold numbers"),
    "weights": ({"src": [0], "dst": [1], "weights": [-1.0]}, ValueError, "e.npz: weights holds -1.0 at 0"),
    "too many": ({"src": [0], "dst": [1], "num_nodes": 10**15}, MemoryError, f"1 edges between {10**15} nodes needs"),
}


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("read_edges")
@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_wrong_arrays_are_named_with_their_file(subject, tmp_path, case):
    arrays, error, message = BAD_ARRAYS[case]
    np.savez(tmp_path / "e.npz", **{name: np.array(values) for name, values in arrays.items()})
    with pytest.raises(error, match=message):
        subject(tmp_path / "e.npz")


@pytest.mark.beyond_contract("error messages")
@NEEDS_PYARROW
@pytest.mark.verifies("read_edges")
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [0], "b": [1], "c": [2]}, "must have columns src and dst, it has a, b, c"),
        ({"src": [0.5], "dst": [1.5]}, "column src must hold whole numbers or text, it holds double"),
        ({"src": ["a"], "dst": [1]}, "column src holds string, dst holds int64; pass --names"),
        ({"src": [0, 1], "dst": [1, None]}, "column dst is null at row 1"),
        ({"src": [0, 1], "dst": [1, -4]}, "column dst holds -4 at row 1"),
        ({"src": [0], "dst": [1], "weight": [-1.0]}, "weights holds -1.0 at 0"),
        ({"src": [0], "dst": [1], "trust": [2.0]}, "column 'trust' may be a weight or not; pass --weights"),
    ],
    ids=["names", "fractions", "one of words", "null", "negative", "weight", "other"],
)
def test_wrong_columns_are_named_with_their_file(subject, tmp_path, columns, message):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), tmp_path / "e.parquet")
    with pytest.raises(ValueError, match=f"e.parquet.*{message}"):
        subject(tmp_path / "e.parquet")


@pytest.mark.beyond_contract("error messages")
@NEEDS_PYARROW
@pytest.mark.verifies("read_edges")
def test_a_column_that_is_there_twice_is_refused(subject, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    twice = pa.Table.from_arrays([pa.array([0]), pa.array([1]), pa.array([2])], names=["src", "dst", "src"])
    pq.write_table(twice, tmp_path / "e.parquet")
    with pytest.raises(ValueError, match=r"e.parquet has 2 columns src; rename all but one"):
        subject(tmp_path / "e.parquet")


@pytest.mark.beyond_contract("error messages")
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are of POSIX systems")
@pytest.mark.verifies("read_edges")
def test_a_pipe_is_read_to_its_end_with_progress(subject, tmp_path):
    """The length of a pipe is unknown, and its last line may come late."""
    os.mkfifo(tmp_path / "edges")
    told = []
    writer = Thread(target=(tmp_path / "edges").write_text, args=("0 1\n1 2\n2 5\n",))
    writer.start()
    graph = subject(tmp_path / "edges", progress=lambda done, total: told.append((done, total)))
    writer.join()
    assert ids_in(graph) == ([0, 1, 2], [1, 2, 5])
    assert told[-1] == (12, None)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("read_edges")
@pytest.mark.parametrize("name", ["e.npz", "e.gz", pytest.param("e.parquet", marks=NEEDS_PYARROW)])
@pytest.mark.parametrize("kept", [0, 20, -30])
def test_a_truncated_archive_is_refused(subject, tmp_path, name, kept):
    path = tmp_path / name
    if name == "e.npz":
        np.savez(path, src=np.arange(1000), dst=np.arange(1000))
    elif name == "e.gz":
        path.write_bytes(gzip.compress(b"".join(b"%d %d\n" % (i, i * i) for i in range(1000))))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"src": range(1000), "dst": range(1000)}), path)
    path.write_bytes(path.read_bytes()[:kept])
    message = "is empty, 0 bytes" if kept == 0 else ".*cannot be unpacked.*it may be truncated, get it again"
    with pytest.raises(ValueError, match=f"{name}:? {message}"):
        subject(path)


# ---- progress of the solver


@pytest.mark.if_subject_takes("progress")
@pytest.mark.verifies("pagerank")
def test_each_round_tells_its_number_and_the_bound(subject):
    told = []
    graph = as_graph(nx.gnp_random_graph(30, 0.2, seed=0, directed=True))
    result = subject(graph, progress=lambda rounds, bound: told.append((rounds, bound)))
    assert [rounds for rounds, _ in told] == list(range(result.iterations + 1))
    assert told[0][1] == np.inf
    assert told[-1][1] == result.error_bound
    assert pagerank(graph).scores.tobytes() == result.scores.tobytes()
