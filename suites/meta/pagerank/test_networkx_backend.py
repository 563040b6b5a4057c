"""The backend ``pdlcheck`` as networkx finds it: by its entry points, in separate processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points

import pytest

from ..clone import ROOT

PROJECT = ROOT / "pyproject.toml"
OTHERS = {"stochastic_graph", "to_scipy_sparse_array"}  # called by networkx's private variants of PageRank
GROUPS = ("networkx.backends", "networkx.backend_info")


@pytest.fixture
def environment(tmp_path):
    """Return an environment with the entry points, from pyproject.toml if an older installation lacks them."""
    found = dict(os.environ, PYTEST_ADDOPTS="-p no:cacheprovider")
    if entry_points(group=GROUPS[0], name="pdlcheck"):
        return found
    if not PROJECT.exists():
        pytest.skip("needs the entry points of the project: install it again")
    declared = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in declared[group].items()) for group in GROUPS]
    folder = tmp_path / "installed" / "pdlcheck_entry_points-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pdlcheck-entry-points\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("\n".join(lines))
    found["PYTHONPATH"] = os.pathsep.join([str(folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


def run(*arguments, environment, folder):
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)


TESTS = ("-m", "pytest", "-rx", "--pyargs", "networkx.algorithms.link_analysis.tests.test_pagerank")


@pytest.mark.slow
def test_the_tests_of_networkx_pass_and_what_is_not_run_is_not_pagerank(environment, tmp_path):
    environment["NETWORKX_TEST_BACKEND"] = "pdlcheck"
    found = run(*TESTS, environment=environment, folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert int(re.search(r"(\d+) passed", found.stdout)[1]) >= 25
    assert set(re.findall(r"^XFAIL .* - '(\w+)' not implemented by pdlcheck", found.stdout, re.M)) <= OTHERS


@pytest.mark.slow
def test_all_of_them_pass_where_networkx_may_fall_back(environment, tmp_path):
    environment |= {"NETWORKX_TEST_BACKEND": "pdlcheck", "NETWORKX_FALLBACK_TO_NX": "1"}
    found = run(*TESTS, environment=environment, folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"^=+ \d+ passed in", found.stdout, re.M), found.stdout


PROGRAM = """
import sys, warnings
import networkx as nx

assert "torch" not in sys.modules, "importing networkx imports torch"
assert "PageRank on all cores" in nx.pagerank.__doc__
graph = nx.gnp_random_graph(200, 0.02, seed=1, directed=True)
expected = nx.pagerank(graph, tol=1e-14, max_iter=2000)
found = nx.pagerank(graph, tol=1e-9, backend="pdlcheck")
assert sum(abs(found[node] - expected[node]) for node in graph) < 2e-9

with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    assert nx.pagerank(graph, tol=1e-9, backend="pdlcheck") == found
assert "conversions to backend graphs are saved" in str(given[0].message)

from pdlcheck.primitives.pagerank import as_graph
assert nx.pagerank(as_graph(graph), tol=1e-9) == found

for arguments in ({"alpha": 1.0}, {"alpha": 1.5}):
    try:
        nx.pagerank(graph, backend="pdlcheck", **arguments)
    except NotImplementedError as error:
        assert "not implemented by 'pdlcheck' backend for the given arguments" in str(error)
    else:
        raise AssertionError("ran")
graph.add_edge(0, 1, weight=-1)
try:
    nx.pagerank(graph, backend="pdlcheck")
except ValueError as error:
    assert "weights holds -1.0" in str(error)
else:
    raise AssertionError("ran")
print("all right")
"""


def test_networkx_calls_it_by_keyword_and_for_a_graph_of_ours(environment, tmp_path):
    found = run("-c", PROGRAM, environment=environment, folder=tmp_path)
    assert (found.returncode, found.stdout) == (0, "all right\n"), found.stderr
