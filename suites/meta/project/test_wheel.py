"""The wheel, installed without extras: some of its suites, on both kinds of ranks. ci/packaged_suites.py runs all."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ..clone import ROOT

SCRIPT = ROOT / "ci" / "packaged_suites.py"
SOME = "overwrites_its_argument or is_the_sum_over_ranks or 4_replicas_reads_the_digits"


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_packaged_suites_end_green_and_skips_say_why(tmp_path):
    command = [sys.executable, SCRIPT, "--keep", tmp_path, "-k", SOME, "--world", "sim,gloo"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"4 passed, 2 skipped, \d+ deselected", run.stdout), run.stdout
    assert "the digits come with scikit-learn: pip install 'pdlcheck[data]'" in run.stdout
    (suites,) = tmp_path.glob("venv/lib/*/site-packages/pdlcheck/suites")
    assert (suites / "conftest.py").exists()
    assert not (suites / "meta").exists()
    benchmarks = suites.parent / "benchmarks"
    assert (benchmarks / "bench_comm.py").exists()
    assert not (benchmarks / "comparisons").exists()
    bench = [suites.parents[4] / "bin" / "python", "-m", "pdlcheck", "bench", "sampler", "--passes", "1"]
    run = subprocess.run(bench, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_sampler[1ranks]" in run.stdout, run.stdout + run.stderr
