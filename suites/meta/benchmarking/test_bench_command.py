"""``pdlcheck bench``: a real run of the smallest suite, also under a launcher, and refused arguments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from pdlcheck.benchmarking.selection import suite_names
from pdlcheck.cli import main

from ..clone import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="needs benchmarks/: run it in a clone")


def bench(folder, *arguments, launcher=()):
    command = [sys.executable, *launcher, "-m", "pdlcheck", "bench", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_run_in_passes_is_one_file_of_pytest_benchmark(tmp_path):
    run = bench(tmp_path, "sampler", "--passes", "2", "--json", "a.json")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "[1/4, " in run.stdout
    assert " s left] test_sampler[gloo-1]" in run.stdout
    assert "test_sampler[1ranks] [torch]" in run.stdout
    assert "3 rows in" in run.stdout
    found = json.loads((tmp_path / "a.json").read_text())
    assert [row["name"] for row in found["benchmarks"]][:2] == ["test_sampler[1ranks]", "test_sampler[1ranks] [torch]"]
    for row in found["benchmarks"]:
        assert len(row["extra_info"]["pass_rounds"]) == 2
        assert sum(row["extra_info"]["pass_rounds"]) == len(row["stats"]["data"]) == row["stats"]["rounds"]
    assert "node" not in found["machine_info"]
    assert found["machine_info"]["pdlcheck"]["cpu"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    theirs = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", "a.json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert theirs.returncode == 0
    assert "test_sampler[1ranks]" in theirs.stdout


PARENTS = """
import os


def test_parents(rank_benchmark, rank):
    with open("parents.txt", "a") as file:
        print(rank, os.getppid(), file=file)
    rank_benchmark(sum, [1, 2])
"""


@pytest.mark.slow
def test_under_a_launcher_each_pass_runs_on_its_processes_and_one_of_them_shows_the_rows(tmp_path):
    (tmp_path / "test_parents.py").write_text(PARENTS)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    run = bench(tmp_path, "test_parents.py", "--passes", "2", launcher=torchrun)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("test_parents[2ranks]") == 1
    assert run.stdout.count("1 row in ") == 1
    parents = (tmp_path / "parents.txt").read_text().splitlines()
    assert len(parents) == 4
    assert len(set(parents)) == 2


OWN = """
import torch
import torch.distributed as dist


def test_sum(rank_benchmark):
    ones = torch.ones(8)
    rank_benchmark(dist.all_reduce, ones, setup=lambda: ones.fill_(1), check=lambda _: int((ones != {expected}).sum()))


def test_called(world, rank_benchmark):
    rank_benchmark(sum, [1, 2], world_size=2)


def test_that_measures_nothing():
    raise AssertionError("it must not run")
"""


@pytest.fixture
def project(tmp_path):
    """Return a project whose settings would spoil a measurement, and that turns warnings into errors."""
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -n 2 --cov=. -p no:cacheprovider\nfilterwarnings = error\n"
    )
    return tmp_path


@pytest.mark.slow
def test_files_of_a_project_are_measured_in_passes_with_its_own_settings(project):
    (project / "tests").mkdir()
    (project / "tests" / "test_sums.py").write_text(OWN.replace("{expected}", "dist.get_world_size()"))
    run = bench(project, "tests", "--ranks", "1,2", "--passes", "2", "--json", "a.json")
    assert run.returncode == 0, run.stdout + run.stderr
    rows = {row["name"]: row["extra_info"] for row in json.loads((project / "a.json").read_text())["benchmarks"]}
    assert list(rows) == ["test_sum[1ranks]", "test_sum[2ranks]", "test_called[2ranks]"]
    assert all(len(facts["pass_rounds"]) == 2 for facts in rows.values())
    assert not (project / ".coverage").exists()


def test_a_file_that_cannot_be_imported_is_shown(project):
    (project / "test_broken.py").write_text("import nothing_of_this_name\n")
    run = bench(project, "test_broken.py")
    assert run.returncode == 1
    assert "FAILS  test_broken.py" in run.stdout
    assert "nothing_of_this_name" in run.stdout


def test_settings_that_pytest_refuses_are_a_usage_error(project):
    (project / "test_sums.py").write_text(OWN)
    (project / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    run = bench(project, "test_sums.py")
    assert run.returncode == 2
    assert "unrecognized arguments: --no-such-option" in run.stderr
    assert run.stderr.endswith("pdlcheck bench: pytest refuses the settings of this project, and says why above\n")


def test_a_file_without_benchmarks_is_no_success(project):
    (project / "test_plain.py").write_text("def test_plain(): pass\n")
    run = bench(project, "test_plain.py")
    assert run.returncode == 1
    assert "nothing was measured: every benchmark was skipped, or there is none" in run.stdout


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(project):
    (project / "test_sums.py").write_text(OWN.replace("{expected}", "dist.get_world_size()"))
    command = [sys.executable, "-m", "pdlcheck", "bench", "test_sums.py", "--passes", "100", "--json", "a.json"]
    with subprocess.Popen(
        command,
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores the signal
    ) as run:
        seen = [next(run.stdout) for _ in range(4)]  # two benchmarks, the test without a measurement, and one of pass 2
        os.killpg(run.pid, signal.SIGINT)
        seen += run.stdout
    assert run.returncode == 130, "".join(seen)
    assert seen[-1] == "pdlcheck bench: interrupted\n"
    rows = {row["name"]: row["extra_info"] for row in json.loads((project / "a.json").read_text())["benchmarks"]}
    assert len(rows["test_sum[2ranks]"]["pass_rounds"]) >= 2
    assert "test_called[2ranks]" in rows


@pytest.mark.slow
def test_a_wrong_result_of_a_projects_own_benchmark_fails(project):
    (project / "test_sums.py").write_text(OWN.replace("{expected}", "1"))
    run = bench(project, "test_sums.py::test_sum", "--passes", "1")
    assert run.returncode == 1
    assert "all_reduce returned 8 wrong elements" in run.stdout


def test_the_suites_have_names():
    assert {"comm", "pagerank", "pipeline", "sync", "training"} <= set(suite_names())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], "there is no suite 'none', and no such file; choose from checkpoint, comm,"),
        (["none.py"], "there is no file none.py"),
        ([f"{__file__}::test_x", "comm"], "is a file and comm a suite: measure them in two runs"),
        (["--world", "nccl"], "--world nccl has CUDA devices; pass --device cuda"),
        (["--json", "/no/such/folder/a.json"], "--json /no/such/folder/a.json cannot be written: No such file"),
        pytest.param(
            ["--device", "cuda"],
            "finds no CUDA device here; see pdlcheck doctor",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device"),
        ),
    ],
)
def test_what_cannot_be_carried_out_is_refused(capsys, arguments, words):
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "0"], "must be numbers of ranks, such as 1,2,4; got '0'"),
        (["--ranks", "two"], "got 'two'"),
        (["--passes", "0"], "must be a whole number of at least 1; got '0'"),
    ],
)
def test_wrong_arguments_name_their_value(capsys, arguments, words):
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_benchmark_that_fails_is_shown_and_the_others_are_kept(tmp_path, monkeypatch):
    """The broken subject is a sampler that raises."""
    (tmp_path / "sitecustomize.py").write_text(
        "import pdlcheck.primitives as p\n"
        "class Broken:\n    def __init__(self, *a, **k): raise RuntimeError('no sampler')\n"
        "p.ShardSampler = Broken\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = bench(tmp_path, "sampler", "--passes", "1")
    assert run.returncode == 1
    assert "FAILS  benchmarks/bench_sampler.py::test_sampler[gloo-1]" in run.stdout
    assert "no sampler" in run.stdout
    assert "test_shard_digest[1ranks]" in run.stdout
    assert "1 row in" in run.stdout
