"""Benchmarks over two hosts with a cable of 1 Gbit/s: no bus bandwidth above the wire, and none far below."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from ..clone import ROOT

TWO_HOSTS = ROOT / "examples" / "ci" / "two_hosts.py"
WIRE_GBps = 0.125
BURST = 1.02  # tolerance for a burst that the cable passes at once, of 16 MiB
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TWO_HOSTS.exists(), reason="needs examples/: run it in a clone"),
    pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))), reason="needs root and iproute2"),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bus_bandwidth_is_that_of_the_wire(tmp_path, ranks):
    bench = ["-m", "pdlcheck", "bench", "comm", "--ranks", str(ranks), "--passes", "2", "--json", "run.json"]
    command = [sys.executable, str(TWO_HOSTS), "--rate", "1gbit", str(ranks), *bench]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row["extra_info"] for row in json.loads((tmp_path / "run.json").read_text())["benchmarks"]}
    for name in (f"test_all_reduce[{ranks}ranks-16777216B]", f"test_all_reduce[{ranks}ranks-16777216B] [torch]"):
        assert 0.6 < rows[name]["busbw_GBps"] / WIRE_GBps < BURST, (name, rows[name])


def test_wrong_numbers_of_ranks_are_refused():
    done = subprocess.run([sys.executable, str(TWO_HOSTS), "1", "-m", "pytest"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "needs 2 ranks or more and a module, got 1" in done.stderr
