"""The command as a user runs it: in a user's folder, and in its own process unless it is refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pdlcheck.cli import main
from pdlcheck.worlds.mpi.job import why_not

MINE = """
import torch.distributed as dist
from pdlcheck.primitives import ring_pass


def right(tensor, group=None):
    return ring_pass(tensor, group)


def wrong(tensor, group=None):
    ring_pass(tensor, group)
    return tensor.add_(dist.get_rank(group) == 1)
"""


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdlcheck", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture
def folder(tmp_path):
    """Return a user's folder, whose pytest settings would stop any run that used them."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "conftest.py").write_text("raise RuntimeError('the conftest of somebody else')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    return tmp_path


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"__pycache__"}


@pytest.fixture(scope="module")
def rejected(tmp_path_factory):
    """Return the result of the run that has to fail, which several tests read."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(MINE)
    arguments = ("--world", "sim", "--examples", "5", "--subject", "ring_pass=mine:wrong", "--json", "found.json")
    return folder, run("verify", *arguments, folder=folder)


@pytest.mark.slow
def test_a_right_function_of_the_users_own_holds_whatever_pytest_settings_lie_around(folder):
    before = files(folder)
    ran = {}
    for world, examples in (("sim", 8), ("gloo", 1)):
        found = run(
            "verify", "--world", world, "--examples", str(examples), "--subject", "ring_pass=mine:right", folder=folder
        )
        assert found.returncode == 0, found.stdout + found.stderr
        assert re.search(rf"ring_pass +{world} +\d+ +\d+  holds", found.stdout)
        (number,) = re.findall(r"all held: .*?(\d+) examples", found.stdout)
        ran[examples] = int(number)
    assert ran[1] < ran[8], "examples are those that ran"
    assert files(folder) == before


def test_a_wrong_function_fails_with_what_is_wrong_and_the_replay(rejected):
    _, found = rejected
    assert found.returncode == 1
    assert re.search(r"ring_pass +sim +\d+ +\d+  FAILS", found.stdout)
    assert "wrong: rank 1 holds" in found.stdout
    assert "case            world=sim" in found.stdout
    assert "NOT all held" in found.stdout


@pytest.mark.slow
def test_the_replay_command_shows_the_same_failure(rejected):
    folder, found = rejected
    (first, *_) = re.findall(r"^replay  python (.*)$", found.stdout, re.M)
    command = [sys.executable, *shlex.split(first), "-p", "no:cacheprovider"]
    again = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert again.returncode == 1
    assert "wrong: rank 1 holds" in again.stdout


def test_the_json_file_of_a_verification_makes_a_report(rejected):
    folder, _ = rejected
    assert main(["report", str(folder / "found.json"), "--output", str(folder / "found.md")]) == 0
    text = (folder / "found.md").read_text()
    assert "failing: NOT all held" in text
    assert "wrong: rank 1 holds" in text
    assert "Run it again: `python " in text


def test_every_primitive_shows_its_progress_on_a_line_of_its_own(rejected):
    _, found = rejected
    assert re.search(r"^ring_pass +sim +\d+ properties +\d+ examples +\d+\.\d s  FAILS", found.stdout, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "mars"], "must name some of gloo, mpi, sim; got 'mars'"),
        (["--world", ""], "must name some of gloo, mpi, sim; got ''"),
        (["--examples", "0"], "must be a whole number of at least 1; got '0'"),
        (["--subject", "ring_pass"], "takes NAME=MODULE:FUNCTION; got 'ring_pass'"),
        (["--subject", "ring_pass=mine:missing"], "cannot load mine:missing"),
        (["--subject", "ring_pass=no_such_module:f"], "cannot load no_such_module:f"),
        (["--subject", "ring_pass=mine:dist"], "which cannot be called"),
        (["--world", "sim", "--subject", "ring_walk=mine:right"], "no suite is about 'ring_walk'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_exit_code_2_with_the_cure(folder, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        main(["verify", *arguments])
    sys.modules.pop("mine", None)
    assert end.value.code == 2
    assert message in capfd.readouterr().err


def test_help_and_version_are_fast_because_torch_is_not_imported(folder):
    assert run("--help", folder=folder).returncode == 0
    assert run("--version", folder=folder).stdout.startswith("pdlcheck ")
    probe = "import sys, pdlcheck.cli; pdlcheck.cli._parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], timeout=60).returncode == 0


def test_the_command_alone_prints_its_help(folder):
    found = run(folder=folder)
    assert found.returncode == 2
    assert "pdlcheck doctor" in found.stdout


@pytest.mark.slow
def test_doctor_tries_the_worlds_and_names_versions(folder):
    found = run("doctor", folder=folder)
    assert found.returncode == 0, found.stderr
    assert "world sim" in found.stdout
    working = ["gloo", "sim"] if why_not() else ["gloo", "mpi", "sim"]
    assert re.findall(r"world (\w+) +works: 2 ranks ran", found.stdout) == working
    for part in ("python", "torch", "cuda", "gloo", "nccl", "mpi", "dgl", "scikit-learn", "hypothesis", "numba"):
        assert re.search(rf"^ ?{part}", found.stdout, re.M), part


WITHOUT = """
import sys
from importlib.machinery import PathFinder


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {gone!r} else PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


@pytest.mark.slow
def test_doctor_prints_json_and_fails_where_something_required_is_missing(folder):
    (folder / "hiding.py").write_text(WITHOUT.format(gone=["pytest_benchmark", "dgl"]))
    code = "import hiding, sys; from pdlcheck.cli import main; sys.exit(main(['doctor', '--json']))"
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    parts = {part["name"]: part for part in json.loads(found.stdout)["parts"]}
    assert parts["world sim"]["required"]
    assert not parts["world sim"]["missing"]
    assert parts["dgl"]["missing"]
    assert not parts["dgl"]["required"]
    assert parts["pytest-benchmark"]["missing"]
    assert parts["pytest-benchmark"]["cure"] == "pip install pytest-benchmark"
    assert found.returncode == 1, found.stderr
    assert "trying the world gloo" in found.stderr  # trying takes seconds


@pytest.mark.slow
def test_what_is_missing_is_named_with_the_command_that_brings_it_and_is_no_failure(folder):
    (folder / "hiding.py").write_text(WITHOUT.format(gone=["dgl", "sklearn"]))
    code = "from rich.console import Console; from pdlcheck.verification.run import _show_packages, _show_replicas; "
    code += "print(_show_packages(Console()).held, *_show_replicas(Console()))"
    found = subprocess.run(
        [sys.executable, "-c", f"import hiding; {code}"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert "pip install 'pdlcheck[dgl]'" in found.stdout
    assert "pip install 'pdlcheck[data]'" in found.stdout
    assert found.stdout.splitlines()[-1].startswith("True None pdlcheck.primitives.digits needs an extra")
