"""The campaign of `python ci/inject_faults.py`: a sample of it passes, and it detects a broken world."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ..clone import ROOT
from ..needs_mpi import needs_mpi

SLOW = pytest.mark.slow
COMMAND = ROOT / "ci" / "inject_faults.py"


def run_campaign(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    if not COMMAND.exists():
        pytest.skip("needs ci/inject_faults.py: run the suites in a clone of the repository")
    if not Path("/proc/self/stat").exists():
        pytest.skip("the campaign looks for leftovers in /proc: run it on Linux")
    command = [sys.executable, str(COMMAND), *options]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=150)


@pytest.mark.parametrize(
    ("world", "seed", "count"),
    [
        ("sim", 3, 12),
        pytest.param("gloo", 2, 3, marks=SLOW),
        pytest.param("torchrun", 1, 2, marks=SLOW),
        pytest.param("mpi", 1, 2, marks=[SLOW, needs_mpi]),
    ],
)
def test_a_sample_of_faults_holds(world, seed, count, tmp_path):
    patient = ("--slow", "30")  # other tests run beside it
    done = run_campaign("--world", world, "--seed", str(seed), "--count", str(count), *patient, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} of {count} faults held on {world}" in done.stdout


BROKEN = {
    "a death is blamed on another rank, and things are left behind": (
        """
        honest = collect.rank_died
        collect.rank_died = lambda rank, *rest, **more: honest(rank + 1, *rest, **more)

        def pytest_unconfigure(config):
            tempfile.mkstemp(prefix="forgotten-")
            open(f"/dev/shm/forgotten-{os.getpid()}", "w").close()
            if os.fork() == 0:
                forgotten = socket.create_server(("127.0.0.1", 0))
                time.sleep(60)
        """,
        [
            r"the report lacks\n +RankDied: rank 2 was killed by SIGKILL",
            r"left process \d+",
            r"left listening port \d+",
            r"left /dev/shm/forgotten-\d+",
            r"left file forgotten-",
        ],
    ),
    "a death is told late, and the pool does not heal": (
        """
        honest = collect.rank_died
        collect.rank_died = lambda *all, **more: time.sleep(4.2) or honest(*all, **more)
        honest_kill = pool.Pool.kill

        def kill(self):
            honest_kill(self)
            self.is_usable = True

        pool.Pool.kill = kill
        pool.Pool.drop_if_lost = lambda self: None
        """,
        [r"reported after \d+\.\d\d s, not within 4 s", "the next test passed, and yet it did not run on ranks"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", BROKEN)
def test_a_broken_world_is_seen(which, tmp_path, monkeypatch):
    code, told = BROKEN[which]
    head = "import os, socket, tempfile, time\nfrom pdlcheck.worlds.processes.controller import collect, pool\n"
    (tmp_path / "broken_world.py").write_text(head + textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    drawn = ("--count", "2", "--seed", "7", "--kinds", "kill-self")
    done = run_campaign(*drawn, "--slow", "4", "--plugin", "broken_world", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "0 of 1 faults held" in done.stdout
    for pattern in told:
        assert re.search(pattern, done.stdout), done.stdout
    assert "--seed 7 --world-sizes 2,3,4 --only 1 --plugin broken_world" in done.stdout
