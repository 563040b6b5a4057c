"""The table of edge files: good files agree with networkx, and errors of bad files name the cure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import networkx as nx
import pytest

from pdlcheck.primitives.pagerank import pagerank, read_edges

from .input_files import BAD, GOOD


def write(folder, case):
    if case.needs is not None and find_spec(case.needs) is None:
        pytest.skip(f"needs {case.needs}, which is missing: pip install 'pdlcheck[dev]'")
    content = case.content() if callable(case.content) else case.content
    path = folder / case.name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def edges_of(graph):
    names = range(graph.num_nodes) if graph.names is None else list(graph.names)
    ends = [(names[u], names[v]) for u, v in zip(graph.src.tolist(), graph.dst.tolist(), strict=True)]
    if graph.weights is None:
        return ends
    return [(*pair, weight) for pair, weight in zip(ends, graph.weights.tolist(), strict=True)]


def nodes_of(case):
    if case.nodes is not None:
        return case.nodes
    nodes = list(dict.fromkeys(node for edge in case.edges for node in edge[:2]))
    return sorted(nodes) if isinstance(nodes[0], int) else nodes


@pytest.mark.parametrize("name", GOOD)
def test_a_good_file_is_read_and_ranked_as_by_networkx(tmp_path, name):
    case = GOOD[name]
    graph = read_edges(write(tmp_path, case), **case.options)
    nodes = nodes_of(case)
    assert list(range(graph.num_nodes) if graph.names is None else graph.names) == nodes
    assert sorted(edges_of(graph)) == sorted(case.edges)
    oracle = nx.MultiDiGraph()
    oracle.add_nodes_from(nodes)
    oracle.add_weighted_edges_from((*edge, 1.0)[:3] for edge in case.edges)
    expected = nx.pagerank(oracle, tol=1e-14, max_iter=2000)
    found = dict(pagerank(graph, tol=1e-12).top(len(nodes)))
    assert found == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_cure(tmp_path, name):
    case = BAD[name]
    path = write(tmp_path, case)
    with pytest.raises(ValueError, match=re.escape(path.name)) as caught:
        read_edges(path, **case.options)
    assert str(caught.value).replace(f"{tmp_path}{os.sep}", "") == case.message
    if case.cured_by is not None:
        assert read_edges(path, **case.cured_by).num_nodes > 0


def test_the_table_has_good_and_bad_files():
    assert len(GOOD) >= 30
    assert len(BAD) >= 30


@pytest.mark.parametrize("name", ["names", "zstd", "arrays", "Matrix Market, pattern", "Parquet, integers"])
def test_a_stream_is_read_as_the_file_is(tmp_path, name):
    """A pipe has no length, and no library can seek in it."""
    case = GOOD[name]
    path = write(tmp_path, case)
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as process:
        graph = read_edges(process.stdout, format="npz" if path.suffix == ".npz" else None)
    assert edges_of(graph) == edges_of(read_edges(path))


def test_a_stream_of_text_is_refused(tmp_path):
    (tmp_path / "e.txt").write_text("0 1\n")
    with (
        (tmp_path / "e.txt").open() as file,
        pytest.raises(TypeError, match=r"from a path or a binary stream, got .*; open it with mode 'rb'"),
    ):
        read_edges(file)
    with (tmp_path / "e.txt").open("rb") as file:
        assert read_edges(file).num_edges == 1


def test_a_missing_library_is_named_with_its_extra(tmp_path):
    """A broken module of that name comes before the real one on the path."""
    if sys.version_info >= (3, 14):
        pytest.skip("zstd is in the standard library")
    (tmp_path / "zstandard.py").write_text("raise ImportError('none')")
    (tmp_path / "e.zst").write_bytes(b"\x28\xb5\x2f\xfd and more")
    code = "from pdlcheck.primitives.pagerank import read_edges\nread_edges('e.zst')"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert "reading a file packed by zstd needs an extra (none): pip install 'pdlcheck[zstd]'" in done.stderr


MALFORMED = {
    "far": {"data": [1.0], "indices": [0], "indptr": [0, 100, 5, 1]},
    "back": {"data": [1.0] * 3, "indices": [0] * 3, "indptr": [0, -5, 2, 3]},
    "outside": {"data": [1.0] * 3, "indices": [0, 1, 9], "indptr": [0, 1, 2, 3]},
    "short": {"data": [1.0] * 3, "indices": [0, 1, 2], "indptr": [0, 1, 2]},
}
READ_ALL = """
import sys
import numpy as np, scipy.sparse as sp
from pathlib import Path
from pdlcheck.primitives.pagerank import as_graph, read_edges
for path in sys.argv[1:]:
    try:
        read_edges(path)
    except ValueError as error:
        print(error)
matrix = sp.csr_array(np.eye(3))
matrix.indptr[1] = 100
try:
    as_graph(matrix)
except ValueError as error:
    print(error)
print(as_graph(sp.csr_array(np.eye(3))))
"""


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_a_malformed_matrix_is_refused_before_scipy_follows_it(tmp_path, form):
    """A separate process reads the files, because a signal ended it before the fix."""
    import numpy as np

    paths = [tmp_path / f"{name}.npz" for name in MALFORMED]
    for path, arrays in zip(paths, MALFORMED.values(), strict=True):
        np.savez(path, format=form, shape=[3, 3], **{name: np.array(values) for name, values in arrays.items()})
    done = subprocess.run([sys.executable, "-c", READ_ALL, *paths], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *refused, in_memory, accepted = done.stdout.splitlines()
    assert [Path(line.split(":")[0]).stem for line in refused] == list(MALFORMED)
    assert in_memory == (
        "the CSR matrix is malformed: its indptr falls from 100 to 2 at 2, it must never fall; write the matrix again"
    )
    assert accepted == "Graph(num_nodes=3, num_edges=3, weighted=False)"
