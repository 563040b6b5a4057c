"""``pdlcheck explain`` with dumps that torch's Flight Recorder has written in a real hang, and with saved verdicts."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import pytest

from pdlcheck.cli import main

HANG = """
import os, sys, threading, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()


def dump():
    if rank == 0:
        time.sleep(0.5)
        store.set("hangs", "yes")
    store.get("hangs")
    with open(f"{sys.argv[1]}/trace_{rank}", "wb") as file:
        file.write(_dump_fr_trace(True, True, False))
    store.add("written", 1)
    while store.add("written", 0) < 3:
        time.sleep(0.05)
    os._exit(0)


x = torch.ones(4)
for step in range(2):
    dist.all_reduce(x)
if sys.argv[2] == "ends":
    dump()
threading.Thread(target=dump).start()
if rank == 0 and sys.argv[2] == "differ":
    dist.broadcast(x, 0)
elif rank == 1:
    dist.all_reduce(x)
time.sleep(100)
"""


@pytest.fixture(scope="module")
def dumps_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hangs")
    (folder / "train.py").write_text(HANG)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_CORE"))}

    def dumps(how):
        into = folder / how
        if not into.exists():
            into.mkdir()
            launch = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                "3",
                "train.py",
                str(into),
                how,
            ]
            recorded = environment | {"TORCH_FR_BUFFER_SIZE": "100"}
            subprocess.run(launch, cwd=folder, env=recorded, capture_output=True, timeout=120, check=False)
            assert len(list(into.iterdir())) == 3
        return into

    return dumps


@pytest.mark.slow
def test_ranks_that_did_not_post_are_named_with_their_last_line(dumps_of, capsys):
    assert main(["explain", str(dumps_of("waits"))]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "the default group: ranks 0, 2 did not post collective 3, and rank 1 waits in it"
    assert told[1].startswith("  rank 1: all_reduce of float (4,) at train.py:")
    assert told[2].startswith("  ranks 0, 2: its last collective is 2, all_reduce of float (4,) at train.py:")
    assert told[3].startswith("  the last that all completed is collective 2, ")


@pytest.mark.slow
def test_ranks_that_differ_are_shown_with_their_lines(dumps_of, capsys):
    assert main(["explain", str(dumps_of("differ"))]) == 1
    told = capsys.readouterr().out
    assert told.startswith("the default group: ranks differ in collective 3\n")
    assert "rank 0: broadcast of float (4,) at train.py:" in told
    assert "rank 1: all_reduce of float (4,) at train.py:" in told


@pytest.mark.slow
def test_a_program_that_ends_hangs_nowhere(dumps_of, capsys):
    assert main(["explain", str(dumps_of("ends"))]) == 0
    assert capsys.readouterr().out == "the default group: all of ranks 0-2 completed collective 2\n"


@pytest.mark.slow
def test_a_missing_dump_is_named(dumps_of, capsys):
    folder = dumps_of("waits")
    assert main(["explain", str(folder / "trace_0"), str(folder / "trace_1")]) == 1
    assert "there is no dump of rank 2: did it end before, or was its file not named?" in capsys.readouterr().out


class Runs:
    def __reduce__(self):
        return print, ("it ran",)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "trace_0",
            pickle.dumps({"entries": [Runs()]}),
            "it holds builtins.print, and a dump holds plain values alone",
        ),
        ("trace_0", b"\x80\x04", "is no dump of torch's Flight Recorder, or a damaged one"),
        ("trace_0", json.dumps({"entries": [{"state": "gone"}]}).encode(), "an operation in the unknown state 'gone'"),
        ("trace", b"", "the name of a dump ends with its rank, such as fr_trace_3"),
    ],
)
def test_a_file_that_is_no_dump_is_refused(tmp_path, capsys, name, content, words):
    (tmp_path / name).write_bytes(content)
    assert main(["explain", str(tmp_path / name)]) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert "it ran" not in told.out


def test_a_file_that_does_not_exist_is_told(tmp_path, capsys):
    assert main(["explain", str(tmp_path / "trace_0")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_a_saved_verdict_is_told_again(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch.distributed as d; d.init_process_group(); d.get_rank() or d.barrier()"
    )
    main(["run", "--json", "found.json", "train.py"])
    said = capfd.readouterr().err
    assert main(["explain", "found.json"]) == 1
    assert capfd.readouterr().out == said
