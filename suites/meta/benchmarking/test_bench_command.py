"""``pdlcheck bench``: a real run of the smallest suite, under a launcher too, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from pdlcheck.benchmarking.session import suite_names
from pdlcheck.cli import main

from ..clone import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="needs benchmarks/: run it in a clone")


def bench(folder, *arguments, launcher=()):
    command = [sys.executable, *launcher, "-m", "pdlcheck", "bench", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def test_a_run_in_passes_is_one_file_of_pytest_benchmark(tmp_path):
    run = bench(tmp_path, "sampler", "--passes", "2", "--json", "a.json")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "[1/4, " in run.stdout and " s left] test_sampler[gloo-1]" in run.stdout
    assert "test_sampler[1ranks] [torch]" in run.stdout and "3 rows in" in run.stdout
    found = json.loads((tmp_path / "a.json").read_text())
    assert [row["name"] for row in found["benchmarks"]][:2] == ["test_sampler[1ranks]", "test_sampler[1ranks] [torch]"]
    for row in found["benchmarks"]:
        assert len(row["extra_info"]["pass_rounds"]) == 2
        assert sum(row["extra_info"]["pass_rounds"]) == len(row["stats"]["data"]) == row["stats"]["rounds"]
    assert "node" not in found["machine_info"] and found["machine_info"]["pdlcheck"]["cpu"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    theirs = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", "a.json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert theirs.returncode == 0 and "test_sampler[1ranks]" in theirs.stdout


def test_under_a_launcher_one_process_shows_the_rows(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    run = bench(tmp_path, "roof", "--passes", "1", launcher=torchrun)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("test_socket[2ranks]") == 1 and run.stdout.count(" rows in ") == 1


def test_the_suites_have_names():
    assert {"comm", "pagerank", "pipeline", "sync", "training"} <= set(suite_names())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], "there is no suite 'none'; choose from checkpoint, comm,"),
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
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_a_benchmark_that_fails_is_shown_and_the_others_are_kept(tmp_path, monkeypatch):
    """The broken subject: a sampler that raises."""
    (tmp_path / "sitecustomize.py").write_text(
        "import pdlcheck.primitives as p\n"
        "class Broken:\n    def __init__(self, *a, **k): raise RuntimeError('no sampler')\n"
        "p.ShardSampler = Broken\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = bench(tmp_path, "sampler", "--passes", "1")
    assert run.returncode == 1
    assert "FAILS  benchmarks/bench_sampler.py::test_sampler[gloo-1]" in run.stdout and "no sampler" in run.stdout
    assert "test_shard_digest[1ranks]" in run.stdout and "1 row in" in run.stdout
