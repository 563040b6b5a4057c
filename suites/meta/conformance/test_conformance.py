"""Tests of torch's own distributed backends pass on the ranks of every world, each world in its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..needs_mpi import needs_mpi

pytest.importorskip("expecttest", reason="torch's tests need expecttest: pip install 'pdlcheck[dev]'")

TESTS = Path(__file__).with_name("conformance.py")


@pytest.mark.slow
@pytest.mark.parametrize("on", ["sim", "gloo", pytest.param("mpi", marks=needs_mpi)])
def test_torchs_tests_pass(on):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS), "--world", on]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 90, done.stdout  # most tests ran: they were not skipped
