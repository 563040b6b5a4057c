"""The examples of check_training pass, each with the library that it is for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..clone import ROOT
from .test_examples import environment

FOLDER = ROOT / "examples" / "training"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.fixture(scope="module")
def verdicts():
    """Run all examples once; return the lines of pytest's summary."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:randomly", FOLDER]
    done = subprocess.run(command, cwd=FOLDER, env=environment(), capture_output=True, text=True, timeout=400)
    found = [line for line in done.stdout.splitlines() if line.startswith(("PASSED ", "FAILED ", "ERROR ", "SKIPPED "))]
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
    return found


@pytest.mark.parametrize("name", FILES)
def test_an_example_of_a_training_passes(verdicts, name):
    of_file = [line for line in verdicts if name in line]
    if of_file and all(line.startswith("SKIPPED ") for line in of_file):
        assert ": pip install " in of_file[0]  # a missing library is the only reason to skip
        pytest.skip(of_file[0])
    assert [line.split()[0] for line in of_file] == ["PASSED", "PASSED"], of_file
    assert len((FOLDER / name).read_text().splitlines()) < 90, f"{name} is too long for an example"
