"""The CI files for other projects (examples/ci) and of this one: linted, and run where this machine can."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..clone import ROOT
from ..needs_slurm import slurm_cluster

FILES = ROOT / "examples" / "ci"
pytestmark = pytest.mark.skipif(not FILES.exists(), reason="needs examples/ci: run the suites in a clone")
PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
GITHUB = [FILES / "github.yml", *sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
PINNED = "rules: {unpinned-uses: {config: {policies: {'actions/*': ref-pin, '*': hash-pin}}}}"
STEP = """
import time

def step():
    time.sleep({seconds})

def test_step(world, rank_benchmark):
    rank_benchmark(step, world_size=2)

def test_the_step(world):
    assert world.run(lambda: 1, world_size=2) == [1, 1]
"""


def program(name, cure):
    found = shutil.which(name, path=PROGRAMS)
    if found is None:
        pytest.skip(f"needs {name}: {cure}")
    return found


def run(command, folder, **variables):
    """Return the exit code and all output; Python and its programs are those that run this test."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=own | {"PATH": PROGRAMS} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


def lint(schema, file):
    checker = program("check-jsonschema", "pip install -e '.[dev]'")
    return run([checker, "--builtin-schema", f"vendor.{schema}", str(file)], file.parent)


def audit(file, folder):
    (folder / "zizmor.yml").write_text(PINNED)
    zizmor = program("zizmor", "pip install -e '.[dev]'")
    return run([zizmor, "--offline", "--no-progress", "--config", "zizmor.yml", str(file)], folder)


@pytest.mark.parametrize("file", GITHUB, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_a_workflow_of_github_fits_its_schema_and_an_audit(file, tmp_path):
    for code, text in (lint("github-workflows", file), audit(file, tmp_path)):
        assert code == 0, text


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("    timeout-minutes: 30\n", "    timeout-minutes: soon\n", "'soon' is not"),
        ("bash ci/distributed.sh test\n", "echo ${{ github.event.pull_request.title }}\n", "template-injection"),
        ("actions/checkout@v5", "somebody/checkout@v5", "unpinned-uses"),
    ],
)
def test_broken_workflows_are_found(tmp_path, right, wrong, words):
    text = (FILES / "github.yml").read_text()
    (tmp_path / "broken.yml").write_text(text.replace(right, wrong, 1))
    found = [lint("github-workflows", tmp_path / "broken.yml"), audit(tmp_path / "broken.yml", tmp_path)]
    assert any(code and words in text for code, text in found), found


def test_the_file_of_gitlab_fits_its_schema(tmp_path):
    code, text = lint("gitlab-ci", FILES / "gitlab.yml")
    assert code == 0, text
    (tmp_path / "broken.yml").write_text(
        (FILES / "gitlab.yml").read_text().replace("    when: always", "    when: ever")
    )
    assert lint("gitlab-ci", tmp_path / "broken.yml")[0] == 1


@pytest.mark.parametrize("name", ["distributed.sh", "nodes.sbatch"])
def test_shell_scripts_are_sound(name):
    code, text = run(["bash", "-n", name], FILES)
    assert code == 0, text
    code, text = run([program("shellcheck", "apt-get install shellcheck"), name], FILES)
    assert code == 0, text


@pytest.fixture
def project(tmp_path):
    (tmp_path / "test_step.py").write_text(STEP.format(seconds=0.01))
    return tmp_path


def distributed(project, *arguments, **variables):
    return run(["bash", str(FILES / "distributed.sh"), *arguments], project, CUDA_VISIBLE_DEVICES="", **variables)


@pytest.mark.slow
def test_tests_run_on_simulated_ranks_and_on_processes(project):
    code, text = distributed(project, "test")
    assert code == 0, text
    assert "on sim" in text
    assert "on gloo" in text
    assert (project / "junit.xml").exists()
    (project / "test_wrong.py").write_text(
        "def test(world):\n    assert world.run(lambda: 1, world_size=2) == [2, 2]\n"
    )
    code, text = distributed(project, "test", TESTS="test_wrong.py")
    assert code == 1
    assert "2 failed" in text


@pytest.mark.slow
def test_a_step_that_became_slower_fails_and_is_in_the_report(project):
    summary = project / "summary.md"
    variables = {"BENCHMARKS": "test_step.py", "GITHUB_STEP_SUMMARY": str(summary)}
    code, text = distributed(project, "bench", "main.json", **variables)
    assert code == 0, text
    assert not summary.exists(), text  # there is no run of main yet
    (project / "bench.json").rename(project / "main.json")
    (project / "test_step.py").write_text(STEP.format(seconds=0.02))
    code, text = distributed(project, "bench", "main.json", **variables)
    assert code == 1, text
    assert "slower" in summary.read_text()
    assert summary.read_text() == (project / "compare.md").read_text()
    assert "test_step" in (project / "report.html").read_text()


@pytest.mark.slow
def test_as_fast_as_before_passes(project):
    code, text = distributed(project, "bench", BENCHMARKS="test_step.py")
    assert code == 0, text
    code, text = distributed(project, "bench", "bench.json", BENCHMARKS="test_step.py", LIMIT="1.5")
    assert code == 0, text


def test_wrong_arguments_are_named(project):
    assert distributed(project)[0] == 2
    assert "usage: bash distributed.sh test | bench [MAIN.json]" in distributed(project, "measure")[1]


@pytest.mark.slow
def test_a_job_of_slurm_tests_and_measures_over_its_nodes(project):
    with slurm_cluster(nodes=2) as variables:
        variables |= {"BENCHMARKS": "test_step.py", "TESTS": "test_step.py"}
        code, text = run(["sbatch", "--wait", str(FILES / "nodes.sbatch")], project, **variables)
        log = "".join(path.read_text() for path in project.glob("distributed-*.log"))
    assert code == 0, text + log
    assert "4 ranks launched by srun, 2 of them on this node" in log, log
    rows = json.loads((project / "bench.json").read_text())["benchmarks"]
    assert [row["name"] for row in rows] == ["test_step[2ranks]"]
