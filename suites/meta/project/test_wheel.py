"""The wheel, installed without extras: some suites, on both kinds of ranks. ci/packaged_suites.py runs all of them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ..clone import ROOT

SCRIPT = ROOT / "ci" / "packaged_suites.py"
SOME = "overwrites_its_argument or is_the_sum_over_ranks or 4_replicas_reads_the_digits"
WITHOUT = {"bench": "bench sampler", "pagerank": "pagerank edges.txt"}  # each extra, and a command that needs it


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return a folder with an environment that has the wheel and what it requires, without extras."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "edges.txt").write_text("0 1\n1 0\n")
    return folder


def _suites(folder, *arguments):
    command = [sys.executable, SCRIPT, "--keep", folder, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)


def _pdlcheck(folder, arguments, timeout=200):
    command = [folder / "venv" / "bin" / "python", "-m", "pdlcheck", *arguments.split()]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_suites_of_a_bare_wheel_end_green_and_skips_name_the_extra(bare):
    run = _suites(bare, "-k", SOME, "--world", "sim,gloo")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"4 passed, \d+ skipped, \d+ deselected", run.stdout), run.stdout
    for extra in ("data", "pagerank", "checkpoint"):
        assert f"pip install 'pdlcheck[{extra}]'" in run.stdout, run.stdout
    (suites,) = bare.glob("venv/lib/*/site-packages/pdlcheck/suites")
    assert (suites / "conftest.py").exists()
    assert not (suites / "meta").exists()
    benchmarks = suites.parent / "benchmarks"
    assert (benchmarks / "bench_comm.py").exists()
    assert not (benchmarks / "comparisons").exists()

    for extra, arguments in WITHOUT.items():
        run = _pdlcheck(bare, arguments)
        assert run.returncode != 0, run.stdout
        assert "needs an extra (No module named" in run.stderr, run.stdout + run.stderr
        assert run.stderr.rstrip().endswith(f"pip install 'pdlcheck[{extra}]'")
    run = _pdlcheck(bare, "doctor --json")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "pip install 'pdlcheck[pagerank]'" in run.stdout

    run = _suites(bare, "--with", "bench", "-k", "nothing_at_all")
    assert run.returncode == 5, run.stdout + run.stderr  # pytest has run no test
    run = _pdlcheck(bare, "bench sampler --passes 1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_sampler[1ranks]" in run.stdout, run.stdout + run.stderr
