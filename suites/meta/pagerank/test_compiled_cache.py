"""Compiled code is kept if some folder can be written, and PageRank runs if none can."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import pdlcheck

PACKAGE = Path(pdlcheck.__file__).parent
RANK = "from pdlcheck.primitives.pagerank import pagerank; print(pagerank(([0, 1], [1, 0])).scores.tolist())"
BACKEND = "import networkx as nx; print(nx.pagerank(nx.DiGraph([(0, 1), (1, 0)]), backend='pdlcheck'))"


@pytest.fixture(scope="module")
def without_cache_folder(tmp_path_factory):
    """Return a copy of the package beside which no cache can be written, because files block the cache folders."""
    root = tmp_path_factory.mktemp("read-only")
    shutil.copytree(PACKAGE, root / "pdlcheck", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in {path.parent for path in (root / "pdlcheck").rglob("*.py")}:
        (folder / "__pycache__").touch()
    return root


def run(root, temporary, *command):
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "HOME": "/dev/null/home",
        "XDG_CACHE_HOME": "/dev/null/cache",
        "TMPDIR": str(temporary),
    }
    environment.pop("NUMBA_CACHE_DIR", None)
    return subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )


def folder_of(temporary):
    return temporary / f"pdlcheck-numba-{os.geteuid()}"


def kept(temporary):
    return list(folder_of(temporary).rglob("*.nbi"))


@pytest.mark.slow
def test_a_temporary_folder_of_this_user_alone_keeps_the_machine_code(without_cache_folder, tmp_path):
    """The command compiles the code, and the networkx backend then uses it."""
    (tmp_path / "edges.txt").write_text("0 1\n1 0\n")
    done = run(without_cache_folder, tmp_path, "-m", "pdlcheck", "pagerank", str(tmp_path / "edges.txt"))
    assert done.returncode == 0, done.stderr
    assert "2 nodes, 2 edges" in done.stdout
    assert stat.S_IMODE(folder_of(tmp_path).stat().st_mode) == 0o700
    first = set(kept(tmp_path))
    assert first
    done = run(without_cache_folder, tmp_path, "-c", BACKEND)
    assert (done.returncode, done.stdout) == (0, "{0: 0.5, 1: 0.5}\n"), done.stderr
    assert first <= set(kept(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_temporary_folder_of_somebody_else_is_not_used(without_cache_folder, tmp_path, kind):
    """Numba unpickles the files in its cache."""
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder_of(tmp_path).symlink_to(tmp_path / "elsewhere")
    else:
        folder_of(tmp_path).mkdir()
        folder_of(tmp_path).chmod(0o777)
    done = run(without_cache_folder, tmp_path, "-c", RANK)
    assert (done.returncode, done.stdout) == (0, "[0.5, 0.5]\n"), done.stderr
    assert kept(tmp_path) == []
