"""Edge files: good ones with their edges, bad ones with their error messages."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

__all__ = ["BAD", "GOOD", "Bad", "Good"]


@dataclass(frozen=True)
class Good:
    """A file, options, and the edges that are read from it: two ids each, perhaps a weight.

    ``nodes`` are all nodes in their order. ``None`` means the ids of the edges: integers are sorted, names are in the
    order of their first edge.
    """

    name: str
    content: str | bytes | Callable[[], bytes]
    edges: list[tuple[Any, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    nodes: list[Any] | None = None
    needs: str | None = None


@dataclass(frozen=True)
class Bad:
    """A file, options, the exact message without the folder's name, and options that make the file valid."""

    name: str
    content: str | bytes | Callable[[], bytes]
    message: str
    options: dict[str, Any] = field(default_factory=dict)
    cured_by: dict[str, Any] | None = None
    needs: str | None = None


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def saved_by_scipy(matrix):
    buffer = io.BytesIO()
    sp.save_npz(buffer, matrix)
    return buffer.getvalue()


def parquet(**columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def zstd(text):
    import zstandard

    half = len(text) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (text[:half], text[half:]))  # two frames


TRIANGLE = [(0, 1), (1, 2), (2, 0)]
GAPS = [(3, 7), (7, 20), (20, 3), (3, 20)]
FRIENDS = [("ann", "bob"), ("bob", "cy"), ("ann", "cy")]
TIMES = "9 8 1254192988\n8 2 1254193000\n2 9 1254194656\n"
ONE_MATRIX = "%%MatrixMarket matrix coordinate {field} {symmetry}\n% a comment\n3 3 3\n"

GOOD = {
    "two integers": Good("e.txt", "0 1\n1 2\n2 0\n", TRIANGLE),
    "tabs, CRLF, comments, no last newline": Good("e.tsv", "# a\r\n0\t1\r\n\r\n% b\r\n1\t2\r\n2\t0", TRIANGLE),
    "commas and a byte order mark": Good("e.csv", "\ufeff0,1\n1,2\n2,0\n", TRIANGLE),
    "semicolons": Good("e.csv", "0;1\n1;2\n2;0\n", TRIANGLE),
    "a delimiter of one's own": Good("e.txt", "0:1\n1:2\n2:0\n", TRIANGLE, {"delimiter": ":"}),
    "ids with gaps": Good("e.txt", "3 7\n7 20\n20 3\n3 20\n", GAPS),
    "ids from 1": Good("e.txt", "1 2\n2 3\n3 1\n", [(1, 2), (2, 3), (3, 1)]),
    "ids of 60 bits": Good(
        "e.txt", f"{2**60} 5\n5 {2**40}\n{2**40} {2**60}\n", [(2**60, 5), (5, 2**40), (2**40, 2**60)]
    ),
    "nodes without edges, asked for": Good("e.txt", "1 2\n2 1\n", [(1, 2), (2, 1)], {"num_nodes": 5}, [0, 1, 2, 3, 4]),
    "nodes without edges only": Good("e.txt", "# none\n", [], {"num_nodes": 3}, [0, 1, 2]),
    "a self-loop and an edge twice": Good("e.txt", "0 0\n0 1\n0 1\n1 0\n", [(0, 0), (0, 1), (0, 1), (1, 0)]),
    "names": Good("e.txt", "ann bob\nbob cy\nann cy\n", FRIENDS),
    "names with blanks between tabs": Good(
        "e.tsv", "New York\tRome\nRome\tSan José\n", [("New York", "Rome"), ("Rome", "San José")]
    ),
    "numbers as names": Good("e.txt", "007 7\n7 x\n", [("007", "7"), ("7", "x")], {"names": True}),
    "quoted CSV": Good(
        "e.csv",
        'from,to\n"Smith, Al","Doe ""Jo"""\n"Doe ""Jo""",Bo\n',
        [("Smith, Al", 'Doe "Jo"'), ('Doe "Jo"', "Bo")],
    ),
    "a quoted name of two lines": Good("e.csv", 'src,dst\n"a\nb",c\nc,"a\nb"\n', [("a\nb", "c"), ("c", "a\nb")]),
    "quoted integers": Good("e.csv", '"0","1"\n"1","2"\n"2","0"\n', TRIANGLE),
    "a header of known names": Good("e.csv", "id,target,source\n9,1,0\n9,2,1\n9,0,2\n", TRIANGLE),
    "a header above integers": Good("e.csv", "page_a,page_b\n0,1\n1,2\n2,0\n", TRIANGLE),
    "a header that is asked for": Good("e.csv", "author,reader\nann,bob\nbob,cy\nann,cy\n", FRIENDS, {"header": True}),
    "no header, asked for": Good("e.csv", "src,dst\ndst,src\n", [("src", "dst"), ("dst", "src")], {"header": False}),
    "a weight by its header": Good(
        "e.csv", "source,target,weight\na,b,2\nb,a,3\na,c,1\n", [("a", "b", 2), ("b", "a", 3), ("a", "c", 1)]
    ),
    "fractions are weights": Good("e.txt", "0 1 0.5\n1 0 2\n0 2 1e-3\n", [(0, 1, 0.5), (1, 0, 2), (0, 2, 1e-3)]),
    "whole weights, asked for": Good(
        "e.txt", "0 1 3\n1 0 2\n0 2 1\n", [(0, 1, 3), (1, 0, 2), (0, 2, 1)], {"weights": True}
    ),
    "times, not asked for": Good("e.txt", TIMES, [(9, 8), (8, 2), (2, 9)], {"weights": False}),
    "times by their header": Good("e.csv", "src,dst,timestamp\n0,1,1254192988\n1,2,5\n2,0,6\n", TRIANGLE),
    "columns by number": Good("e.txt", "7 0 1 x\n7 1 2 y\n7 2 0 z\n", TRIANGLE, {"columns": (2, 3)}),
    "columns by name": Good(
        "e.csv",
        "when,a,b,n\n5,x,y,2\n6,y,x,1\n7,x,z,4\n",
        [("x", "y", 2), ("y", "x", 1), ("x", "z", 4)],
        {"columns": ("a", "b", "n")},
    ),
    "triples": Good("e.tsv", "ann\tknows\tbob\nbob\tknows\tcy\nann\tsaw\tcy\n", FRIENDS, {"columns": (1, 3)}),
    "undirected": Good("e.txt", "1 2\n2 2\n2 3\n", [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2)], {"undirected": True}),
    "SNAP, directed": Good(
        "e.txt", "# Directed graph: e\n# Nodes: 3 Edges: 4\n# FromNodeId\tToNodeId\n3\t7\n7\t20\n20\t3\n3\t20\n", GAPS
    ),
    "SNAP, undirected": Good(
        "e.txt", "# Undirected graph: e\n# Nodes: 3 Edges: 2\n3\t7\n7\t20\n", [(3, 7), (7, 3), (7, 20), (20, 7)]
    ),
    "KONECT, directed": Good("out.e", "% asym unweighted\n% 3 3 3\n1 2\n2 3\n3 1\n", [(1, 2), (2, 3), (3, 1)]),
    "KONECT, undirected, with counts and times": Good(
        "out.e", "% sym positive\n1 2 3 1254192988\n2 3 1 1254192989\n", [(1, 2, 3), (2, 1, 3), (2, 3, 1), (3, 2, 1)]
    ),
    "KONECT, signed, without weights": Good(
        "out.e", "% asym signed\n1 2 -1\n2 1 1\n", [(1, 2), (2, 1)], {"weights": False}
    ),
    "Matrix Market, pattern": Good(
        "e.mtx", ONE_MATRIX.format(field="pattern", symmetry="general") + "1 2\n2 3\n2 1\n", [(1, 2), (2, 3), (2, 1)]
    ),
    "Matrix Market, symmetric, an empty row": Good(
        "e.mtx",
        "%%MatrixMarket matrix coordinate real symmetric\n4 4 2\n2 1 0.5\n3 3 2\n",
        [(2, 1, 0.5), (1, 2, 0.5), (3, 3, 2)],
        nodes=[1, 2, 3, 4],
    ),
    "Matrix Market under another name, packed": Good(
        "e.txt.gz",
        gzip.compress((ONE_MATRIX.format(field="integer", symmetry="general") + "1 2 4\n2 1 1\n1 3 2\n").encode()),
        [(1, 2, 4), (2, 1, 1), (1, 3, 2)],
    ),
    "METIS": Good("e.graph", "% a comment\n3 2\n2\n1 3\n2\n", [(1, 2), (2, 1), (2, 3), (3, 2)]),
    "METIS with weights of nodes and edges, a node alone": Good(
        "e.graph",
        "4 2 011 1\n9 2 5\n9 1 5 3 7\n9 2 7\n9\n",
        [(1, 2, 5), (2, 1, 5), (2, 3, 7), (3, 2, 7)],
        nodes=[1, 2, 3, 4],
    ),
    "gzip under any name": Good("e", gzip.compress(b"0 1\n1 2\n2 0\n"), TRIANGLE),
    "bzip2": Good("e.txt.bz2", bz2.compress(b"0 1\n1 2\n2 0\n"), TRIANGLE),
    "xz": Good("e.txt.xz", lzma.compress(b"0 1\n1 2\n2 0\n"), TRIANGLE),
    "zstd": Good("e.txt.zst", lambda: zstd(b"0 1\n1 2\n2 0\n"), TRIANGLE, needs="zstandard"),
    "arrays": Good("e.npz", npz(src=[3, 7, 20, 3], dst=[7, 20, 3, 20]), GAPS),
    "arrays of names": Good(
        "e.npz", npz(src=["ann", "bob", "ann"], dst=["bob", "cy", "cy"]), FRIENDS, nodes=["ann", "bob", "cy"]
    ),
    "arrays with weights and nodes": Good(
        "e.npz", npz(src=[0, 1], dst=[1, 0], weights=[2.0, 0.5], num_nodes=3), [(0, 1, 2), (1, 0, 0.5)], nodes=[0, 1, 2]
    ),
    "a matrix of scipy": Good(
        "e.npz",
        saved_by_scipy(sp.csr_array(np.array([[0, 2.0, 0], [1, 0, 0], [0, 0, 0]]))),
        [(0, 1, 2), (1, 0, 1)],
        nodes=[0, 1, 2],
    ),
    "Parquet, integers": Good("e.parquet", lambda: parquet(a=[3, 7, 20, 3], b=[7, 20, 3, 20]), GAPS, needs="pyarrow"),
    "Parquet, names and a weight": Good(
        "e.parquet",
        lambda: parquet(weight=[2, 1], to=["b", "a"], frm=["a", "b"], when=[1, 2]),
        [("a", "b", 2), ("b", "a", 1)],
        {"columns": ("frm", "to", "weight")},
        needs="pyarrow",
    ),
    "Parquet, a weight by its name": Good(
        "e",
        lambda: parquet(source=["a", "b"], target=["b", "a"], weight=[2, 1]),
        [("a", "b", 2), ("b", "a", 1)],
        needs="pyarrow",
    ),
}

OR_NAMES = "where ids are names, pass --names (names=True)"
NOT_A_NUMBER = (
    "this is not a number; the ids of the first edge are whole numbers, so all must be; correct it, begin a "
    "comment with "
    f"# or %; {OR_NAMES}"
)
WEIGHT_OR_NOT = "pass --weights if it is a weight, --no-weights if not (weights=True, weights=False)"
THIRD = "the third column holds {}, a weight, a count or a time; " + WEIGHT_OR_NOT

BAD = {
    "empty": Bad("e.txt", "", "e.txt is empty, 0 bytes; get the file again"),
    "empty, packed": Bad(
        "e.gz",
        gzip.compress(b""),
        "e.gz: it holds no edge; an edge is a line `src dst`, get the file again, or pass --num-nodes for nodes alone",
        cured_by={"num_nodes": 2},
    ),
    "comments only": Bad(
        "e.txt",
        "# src dst\n\n",
        "e.txt: it holds no edge; an edge is a line `src dst`, get the file again, or pass --num-nodes for nodes alone",
        cured_by={"num_nodes": 2},
    ),
    "a header only": Bad(
        "e.csv",
        "src,dst\n",
        "e.csv:1: the only line is a header; add edges, or pass --no-header",
        cured_by={"header": False},
    ),
    "a name among integers": Bad(
        "e.txt", "0 1\n1 x\n", f"e.txt:2: {NOT_A_NUMBER}; the line is '1 x'", cured_by={"names": True}
    ),
    "a negative id": Bad(
        "e.txt",
        "0 1\n-1 1\n",
        f"e.txt:2: a node id is negative; correct it; {OR_NAMES}; the line is '-1 1'",
        cured_by={"names": True},
    ),
    "an id of 64 bits": Bad(
        "e.txt",
        f"0 {2**63}\n",
        f"e.txt:1: a node id is beyond 2**63 - 1; {OR_NAMES}; the line is '0 {2**63}'",
        cured_by={"names": True},
    ),
    "a truncated line": Bad(
        "e.txt",
        "10 11\n11 12\n12",
        "e.txt:3: an edge needs two ids, here is one; complete the line, the file may be truncated; the line is '12'",
    ),
    "an empty name": Bad(
        "e.csv", "a,b\nb,\n", "e.csv:2: a node id is empty; fill it, the file may be truncated; the line is 'b,'"
    ),
    "one column": Bad(
        "e.txt",
        "a:b\nb:c\n",
        "e.txt:1: an edge needs two ids, here is one: ['a:b']; complete the line, the file may be truncated, "
        "or pass --delimiter",
        cured_by={"delimiter": ":"},
    ),
    "times or weights": Bad("e.txt", TIMES, f"e.txt:1: {THIRD.format(1254192988)}", cured_by={"weights": False}),
    "counts or times": Bad("e.txt", "0 1 2\n1 0 3\n", f"e.txt:1: {THIRD.format(2)}", cured_by={"weights": True}),
    "a column of an unknown name": Bad(
        "e.csv",
        "src,dst,amount\n0,1,5\n1,0,6\n",
        f"e.csv:2: column 'amount' may be a weight or not; {WEIGHT_OR_NOT}",
        cured_by={"weights": True},
    ),
    "four columns": Bad(
        "e.txt",
        "0 1 1 1254192988\n",
        "e.txt:1: a line has 4 fields, and no header says which are the edges; choose them with --columns, "
        "as in --columns 1,2 or --columns 1,2,3 with weights (columns=...)",
        cured_by={"columns": (1, 2, 3)},
    ),
    "triples without columns": Bad(
        "e.tsv",
        "ann\tknows\tbob\n",
        "e.tsv:1: the third field is no weight: 'bob'; choose the columns of an edge with --columns, as in "
        "--columns 1,2 (columns=...), or pass --no-weights (weights=False)",
        cured_by={"columns": (1, 3)},
    ),
    "more fields in a line": Bad(
        "e.txt",
        "a b\nb c d\n",
        "e.txt:2: this line has more fields than the first edge; correct it, or choose columns with --columns "
        "(columns=...); the line is 'b c d'",
        cured_by={"columns": (1, 2)},
    ),
    "a negative weight": Bad(
        "e.txt",
        "0 1 0.5\n1 0 -2\n",
        "e.txt:2: a weight is negative; it must be 0 or more, 0 stands for an edge that carries nothing; "
        "--no-weights (weights=False) leaves weights out; the line is '1 0 -2'",
        cured_by={"weights": False},
    ),
    "an open quote": Bad(
        "e.csv",
        'a,b\n"b,c\n',
        "e.csv:2: unexpected end of data; double a quote that is part of a name, and close each quote; the line is "
        "'\"b,c'",
    ),
    "Latin-1": Bad(
        "e.txt",
        b"a b\n\xe9a b\n",
        "e.txt:2: invalid continuation byte in UTF-8; convert the file with iconv; the line is '\ufffda b'",
    ),
    "UTF-16": Bad(
        "e.txt",
        "0 1\n".encode("utf-16"),
        "e.txt is text in UTF-16, not a file of edges; convert it to UTF-8 with iconv",
    ),
    "binary": Bad(
        "e.txt", b"\x7fELF\x00\x01", "e.txt is no text: byte 4 is 0; give the file of edges, or pass --format"
    ),
    "a zip archive": Bad(
        "e.zip", b"PK\x03\x04 and more", "e.zip is a zip archive, not a file of edges; unpack it with unzip"
    ),
    "a torn gzip": Bad(
        "e.gz",
        gzip.compress(b"0 1\n" * 99)[:-9],
        "e.gz cannot be unpacked: Compressed file ended before the end-of-stream marker was reached; it may be "
        "truncated, get it again",
    ),
    "a torn zstd": Bad(
        "e.zst",
        lambda: zstd(b"0 1\n" * 99)[:-3],
        "e.zst cannot be unpacked: the last frame has no end; it may be truncated, get it again",
        needs="zstandard",
    ),
    "KONECT, two kinds of nodes": Bad(
        "out.e",
        "% bip unweighted\n1 1\n1 2\n",
        "out.e: its first line says bip, so equal ids of its two sides are different nodes; give the "
        "sides different ids, or pass --format text where equal ids are one node",
        cured_by={"format": "text"},
    ),
    "KONECT, signed": Bad(
        "out.e",
        "% asym signed\n1 2 1\n2 1 1\n",
        f"out.e:2: the third column is signed (KONECT), which may be negative or no weight at all; {WEIGHT_OR_NOT}",
        cured_by={"weights": True},
    ),
    "Matrix Market, rectangular": Bad(
        "e.mtx",
        "%%MatrixMarket matrix coordinate pattern general\n2 3 1\n1 2\n",
        "e.mtx: graph: an adjacency matrix must be square, got shape (2, 3)",
    ),
    "Matrix Market, dense": Bad(
        "e.mtx",
        "%%MatrixMarket matrix array real general\n1 1\n1\n",
        "e.mtx: it is a dense matrix (array), edges are entries of a sparse one; write it as coordinate",
    ),
    "Matrix Market, negative": Bad(
        "e.mtx",
        "%%MatrixMarket matrix coordinate real general\n2 2 1\n1 2 -3\n",
        "e.mtx:3: a weight is negative; it must be 0 or more, 0 stands for an edge that carries nothing; --no-weights "
        "(weights=False) leaves weights out; the line is '1 2 -3'",
        cured_by={"weights": False},
    ),
    "Matrix Market, a row too many": Bad(
        "e.mtx",
        "%%MatrixMarket matrix coordinate pattern general\n2 2 2\n1 2\n2 3\n",
        "e.mtx: entry 2 is in row 2 and column 3, both must be from 1 to 2; correct it",
    ),
    "Matrix Market, rows from 0": Bad(
        "e.mtx",
        "%%MatrixMarket matrix coordinate pattern general\n2 2 1\n0 1\n",
        "e.mtx: entry 1 is in row 0 and column 1, both must be from 1 to 2; correct it",
    ),
    "Matrix Market, cut": Bad(
        "e.mtx",
        "%%MatrixMarket matrix coordinate real general\n2 2 2\n1 2 0.5\n",
        "e.mtx: line 2 says 2 entries, the file has 1; it may be truncated, get it again",
    ),
    "Matrix Market, no sizes": Bad(
        "e.mtx",
        "%%MatrixMarket matrix coordinate real general\n% a comment\n",
        "e.mtx: it has no line `rows columns entries`; it may be truncated, get it again",
    ),
    "Matrix Market, wrong sizes": Bad(
        "e.mtx",
        "%%MatrixMarket matrix coordinate real general\n2 2\n1 2 3\n",
        "e.mtx: line 2 must be `rows columns entries`, it is '2 2'; correct it",
    ),
    "Matrix Market, nothing in it": Bad(
        "e.mtx",
        "%%MatrixMarket matrix coordinate real general\n0 0 0\n",
        "e.mtx: it has no rows, so the graph has no nodes; get it again",
    ),
    "Matrix Market, a number that no computer adds": Bad(  # scipy.io.mmread of scipy 1.17 ends the process
        "e.mtx",
        f"%%MatrixMarket matrix coordinate real symmetric\n3 3 1\n2 1 {'1' * 99}\xe2{'1' * 9}",
        "e.mtx:3: a weight is not a decimal number; correct it, or pass --no-weights (weights=False); the line is "
        f"'2 1 {'1' * 56}'...",
    ),
    "text, a quote that nobody closes": Bad(
        "e.txt",
        'source;target\n"a;c\n',
        "e.txt:2: a quote is not closed; double a quote that is part of a name",
    ),
    "METIS, no nodes": Bad(
        "e.graph", "0 0\n", "e.graph:1: the first line says 0 nodes, a graph has one at least; get the file again"
    ),
    "a matrix of scipy whose format is no text": Bad(
        "e.npz",
        lambda: npz(format=True, shape=[1, 1], data=[1.0], row=[0], col=[0]),
        "e.npz: it holds no arrays as numpy.savez and scipy.sparse.save_npz write them: 'bool' object has no attribute "
        "'decode'; write it again",
    ),
    "METIS, a node too few": Bad(
        "e.graph",
        "3 2\n2\n1 3\n",
        "e.graph:3: the first line says 3 nodes, here are 2; the file may be truncated, get it again",
    ),
    "METIS, one direction": Bad(
        "e.graph",
        "2 1\n2\n\n",
        "e.graph: the first line says 1 edges, so 2 neighbours, here are 1; each edge stands in the lines of "
        "both nodes",
    ),
    "num_nodes with names": Bad(
        "e.txt",
        "a b\n",
        "e.txt: num_nodes is 3, but ids are names; leave out --num-nodes (num_nodes=None)",
        {"num_nodes": 3},
        {},
    ),
    "num_nodes too small": Bad(
        "e.txt",
        "1 2\n",
        "e.txt: dst holds 2 at 0, ids must be in [0, 2); correct the id or pass a larger num_nodes",
        {"num_nodes": 2},
        {},
    ),
    "an option of another format": Bad(
        "e.mtx",
        "%%MatrixMarket matrix coordinate pattern general\n1 1 1\n1 1\n",
        "e.mtx is read as matrix-market, which takes no delimiter; leave it out, or pass --format",
        {"delimiter": ","},
        {},
    ),
    "a column that is not there": Bad(
        "e.csv",
        "a,b\n1,2\n",
        "e.csv: column 'c' is not there, its columns are a, b; choose others",
        {"columns": ("a", "c")},
        {"columns": ("a", "b")},
    ),
    "Parquet without ends": Bad(
        "e.parquet",
        lambda: parquet(x=[0], y=[1], z=[2]),
        "e.parquet must have columns src and dst, it has x, y, z; choose them with --columns "
        "SRC,DST or --columns SRC,DST,WEIGHT (columns=...)",
        cured_by={"columns": ("z", "x")},
        needs="pyarrow",
    ),
    "Parquet, a third column": Bad(
        "e.parquet",
        lambda: parquet(src=[0], dst=[1], trust=[2.0]),
        f"e.parquet: column 'trust' may be a weight or not; {WEIGHT_OR_NOT}",
        cured_by={"weights": True},
        needs="pyarrow",
    ),
    "Parquet without rows": Bad(
        "e.parquet",
        lambda: parquet(src=np.array([], dtype=object).astype(str), dst=np.array([], dtype=object).astype(str)),
        "e.parquet: it holds no edge; an edge is a line `src dst`, get the file again, or pass --num-nodes for nodes "
        "alone",
        needs="pyarrow",
    ),
    "Parquet that lost its rows": Bad(
        "e.parquet",
        lambda: (Path(__file__).parents[3] / "ci/fuzzing/corpus/parquet/found-913a2ee5").read_bytes(),
        "e.parquet says that it has 2 rows, and has 0; it is damaged, get the file again",
        needs="pyarrow",
    ),
}
