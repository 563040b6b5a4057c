"""`python ci/fuzz_readers.py` detects readers that crash, hang, use much memory or change objects, and no others."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ..clone import ROOT

COMMAND = ROOT / "ci" / "fuzz_readers.py"

BROKEN = {
    "crashes": (
        "journal",
        """
        import ctypes
        from fuzzing import exchange
        honest = exchange.notes
        exchange.notes = lambda text: ctypes.string_at(0) if "[[" in text else honest(text)
        """,
        r"journal: the process that read it was ended by SIGSEGV",
    ),
    "hangs": (
        "journal",
        """
        from fuzzing import exchange
        from fuzzing import limits
        limits.LIMIT_S = 1
        exchange.notes = lambda text: exec("while '[[' in text: pass") or []
        """,
        r"it took more than 1 s",
    ),
    "takes memory": (
        "metis",
        """
        from pdlcheck.primitives.pagerank.files import reading
        honest = reading.read_metis
        reading.read_metis = lambda source, *rest: (b"x" * (400 << 20), honest(source, *rest))[1]
        """,
        r"it took \d\d\d MB of memory, the limit is 256",
    ),
    "takes an id that is no node": (
        "npz",
        """
        from pdlcheck.primitives.pagerank.files import reading
        honest = reading._graph_of
        def shifted(*arguments):
            file = honest(*arguments)
            object.__setattr__(file.graph, "src", file.graph.src + 1)
            return file
        reading._graph_of = shifted
        """,
        r"has an id outside",
    ),
    "loses the name of the file": (
        "matrix-market",
        """
        import contextlib
        from pdlcheck.primitives.pagerank.files import reading
        reading._named = contextlib.nullcontext
        """,
        r"the error does not name the file",
    ),
    "touches an object before it refuses": (
        "checkpoint-tree",
        """
        import importlib
        load = importlib.import_module("pdlcheck.primitives.checkpoint.load")
        load.well_formed = lambda payload: True
        """,
        r"checkpoint-tree: Traceback",
    ),
    "lets a stranger in": (
        "door",
        """
        from pdlcheck.worlds.launched import door
        door.answer_challenge = door.deliver_challenge = lambda connection, key: None
        """,
        r"a stranger was (let in|trusted)",
    ),
}


def fuzz(folder, *options):
    if not COMMAND.exists():
        pytest.skip("needs ci/fuzz_readers.py: run the suites in a clone of the repository")
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the fuzzer measures memory in /proc: run it on Linux")
    command = [sys.executable, str(COMMAND), "--corpus", str(folder / "found"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
def test_a_reader_that_is_broken_is_found(how, tmp_path, monkeypatch):
    target, code, told = BROKEN[how]
    (tmp_path / "broken_reader.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = fuzz(tmp_path, "--only", target, "--seconds", "20", "--plugin", "broken_reader")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(told, done.stdout), done.stdout
    replay = re.search(rf"replay: python ci/fuzz_readers.py --only {target} --replay (.+)", done.stdout)
    assert Path(replay[1]).parent == tmp_path / "found" / target
    if how == "crashes":  # a replay is the same for all kinds
        again = fuzz(tmp_path, "--only", target, "--replay", replay[1], "--plugin", "broken_reader")
        assert again.returncode == 1
        assert fuzz(tmp_path, "--only", target, "--replay", replay[1]).returncode == 0


@pytest.mark.slow
def test_what_has_broken_a_reader_once_does_so_no_more(tmp_path):
    done = fuzz(tmp_path, "--seconds", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "door: " in done.stdout
