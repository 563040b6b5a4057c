"""Each test of the README runs as a newcomer runs it: in its own folder, without this project's settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from ..clone import ROOT
from .test_readme import _same

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", README, re.DOTALL)
MINE = """
import torch.distributed as dist

def my_all_reduce(tensor, group=None):
    dist.all_reduce(tensor, group=group)
"""


def _name(source):
    named = re.match(r"# (\w+\.py)\n", source)
    return named.group(1) if named else re.findall(r"def (test_\w+)", source)[0] + ".py"


def _errors(output):
    """Return the first line of each exception, without its module, which pytest omits on processes."""
    return re.findall(r"^E +(?:\w+\.)*(\w*(?:Error|Deadlock|CheckFailed): .*)", output, re.M)


@pytest.fixture
def environment():
    """Return the environment of a user: no variables of a running pytest or of continuous integration."""
    ours = ("PYTEST", "HYPOTHESIS", "COV_CORE", "CI", "GITHUB_ACTIONS", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sim", "gloo"])
@pytest.mark.parametrize(("source", "told"), BLOCKS, ids=[_name(source) for source, _ in BLOCKS])
def test_a_block_has_the_verdict_that_the_readme_tells(tmp_path, environment, source, told, world):
    (tmp_path / _name(source)).write_text(source)
    if "from mine import" in source:
        (tmp_path / "mine.py").write_text(MINE)
    command = [sys.executable, "-m", "pytest", _name(source), "--world", world]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert f"rootdir: {tmp_path}\n" in run.stdout, run.stdout + run.stderr
    expected = _errors(told)
    assert (run.returncode == 1) == bool(expected), run.stdout
    for line in expected:
        assert any(_same(line, found) for found in _errors(run.stdout)), f"not printed: {line}\n{run.stdout}"
    if not expected:
        assert run.returncode == 0, run.stdout
        assert " passed" in run.stdout, run.stdout
        assert "warning" not in run.stdout, run.stdout


def test_the_readme_has_blocks_that_fail_and_one_that_holds():
    assert [bool(_errors(told)) for _, told in BLOCKS] == [True, False, True, True]
