"""Runs one pytest session of one harness on generated tests, and takes its times."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from peers.sides import Side

__all__ = ["Session", "run_session"]

_LIMIT_S = 600

# The rank that reports notes when things happen; imports of torch lie before the first of them.
_CLOCK = """

import json as _json
import os as _os
import time as _time

import torch.distributed as _

_clock = {"starts": []}


def pytest_collection():
    _clock["collection"] = _time.perf_counter()


def pytest_collection_finish():
    _clock["collected"] = _time.perf_counter()


def pytest_runtest_logstart():
    _clock["starts"].append(_time.perf_counter())


def pytest_sessionfinish():
    _clock["end"] = _time.perf_counter()
    if _clock["starts"] and _os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        with open(_os.path.join(_os.path.dirname(__file__), "clock.json"), "w") as file:
            _json.dump(_clock, file)
"""


@dataclass(frozen=True)
class Session:
    """What one session took.

    Args:
        wall_s: the whole command.
        cpu_s: user and system time of the command and all processes that it waited for.
        tests_s: collection, and from the begin of the second test to that of the last, if there are so many. What
            happens once is not in it: imports, and the start and end of processes, which every harness has in the first
            and the last test or outside of them.
        starts_s: when each test began, by a clock of its own.
    """

    wall_s: float
    cpu_s: float
    tests_s: float
    starts_s: Sequence[float]

    @property
    def between_s(self) -> float | None:
        """Median time from the begin of one test to that of the next, the first left out."""
        gaps = [later - earlier for earlier, later in pairwise(self.starts_s)][1:]
        return median(gaps) if gaps else None


def run_session(side: Side, tests: int, world_size: int, python: str, mpiexec: str) -> Session:
    """Generate the tests, run them with ``side``, see to it that each of them passed.

    The file has been collected once before: pytest has its assertions rewritten and keeps that, as in every run but the
    first after a change. It takes about a millisecond for one of them, whichever harness runs the test.

    Raises:
        RuntimeError: some test did not pass: the times would say nothing.
    """
    with tempfile.TemporaryDirectory(prefix="pdlcheck-peers-") as folder:
        home = Path(folder)
        (home / "test_sums.py").write_text(side.source(tests, world_size))
        (home / "conftest.py").write_text(side.conftest + _CLOCK)
        (home / "pytest.ini").write_text("[pytest]\n")
        if not side.starts_processes:  # there it is nothing beside the rest
            _run([*side.command(python, mpiexec, 1), "--collect-only"], home)
        command = side.command(python, mpiexec, world_size)
        used, start = _children_cpu_s(), time.perf_counter()
        done = _run(command, home)
        wall_s, cpu_s = time.perf_counter() - start, _children_cpu_s() - used
        passed = re.findall(r"\b(\d+) passed", done.stdout)
        expected = side.items(tests)
        if done.returncode or not passed or set(passed) != {str(expected)}:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise RuntimeError(f"{side.name}: {expected} tests on {world_size} ranks did not all pass:\n{said}")
        clock = json.loads((home / "clock.json").read_text())
        starts = clock["starts"]
        second = starts[1] if len(starts) > 1 else clock["end"]
        last = starts[-1] if len(starts) > 2 else clock["end"]
        tests_s = clock["collected"] - clock["collection"] + last - second
        return Session(wall_s, cpu_s, tests_s, starts)


def _run(command: Sequence[str], home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=home,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def _environment() -> dict[str, str]:
    """The same for every side: no plugin but its own, one thread a rank, compiled tests kept as users have them."""
    dropped = ("PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE")
    own = {name: value for name, value in os.environ.items() if name not in dropped}
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]  # for peers.real_tests
    return own | {
        "GLOO_SOCKET_IFNAME": "lo",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
