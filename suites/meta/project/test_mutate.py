"""`python ci/mutate.py` runs the tests on mutants of a module and fails on a survivor that is not listed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib

import pytest

from ..clone import ROOT

COMMAND = ROOT / "ci" / "mutate.py"
LISTS = ROOT / "ci" / "mutation"
pytestmark = pytest.mark.skipif(not COMMAND.exists(), reason="needs ci/: run the suites in a clone of the repository")

REASONS = ("equivalent: ", "only speed: ", "only a message: ", "not on sim: ", "gap: ")

MODULE = """
def clipped(value):
    return max(value, 0)

def opposite(value):
    return not value
"""
TESTS = """
from module import clipped

def test_clipped(world):
    assert world.run(clipped, 0, world_size=2) == [0, 0]
"""
LISTED = """
module.py clipped
- return max(value, 0)
+ return max(value, -1)
gap: no test has a negative value
"""
UNLISTED = """
module.py opposite
- return not value
+ return value
gap: \n"""


def test_modules_and_tests_and_the_modules_of_survivors_exist():
    tables = tomllib.loads((LISTS / "modules.toml").read_text())
    for module, tests in (tables["listed"] | tables["not_run_yet"]).items():
        assert (ROOT / module).exists(), module
        for word in tests.split():
            assert (ROOT / word.partition("::")[0]).exists(), f"{module}: there is no {word}"


def test_each_survivor_has_its_module_and_a_reason():
    listed = tomllib.loads((LISTS / "modules.toml").read_text())["listed"]
    for block in (LISTS / "survivors.txt").read_text().strip().split("\n\n")[1:]:
        where, old, new, reason = block.split("\n")
        assert where.split()[0] in listed, block
        assert (old[:2], new[:2]) == ("- ", "+ "), block
        assert reason.startswith(REASONS), block


@pytest.mark.slow
def test_a_survivor_that_is_not_listed_fails_the_command(tmp_path):
    pytest.importorskip("cosmic_ray", reason="needs cosmic-ray: pip install -e '.[dev]'")
    (tmp_path / "ci" / "mutation").mkdir(parents=True)
    shutil.copy(COMMAND, tmp_path / "ci")
    lists = tmp_path / "ci" / "mutation"
    lists.joinpath("modules.toml").write_text(
        'operators = ["NumberReplacer", "ReplaceUnaryOperator_Delete_Not"]\n'
        '[listed]\n"module.py" = "test_module.py"\n[not_run_yet]\n'
    )
    lists.joinpath("survivors.txt").write_text(f"# comment\n{LISTED}")
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TESTS)
    command = [sys.executable, tmp_path / "ci" / "mutate.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "s, gap: no test has a negative value" in done.stdout
    assert UNLISTED in done.stdout
    assert "2 found, 0 not applied, 2 survive, 1 of them not listed" in done.stdout
