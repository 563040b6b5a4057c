"""Run one pytest session of one harness on generated tests, and measure its times."""

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

# The rank that reports notes the times; imports of torch come before the first of them.
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
    """The times of one session.

    Args:
        wall_s: wall time of the whole command.
        cpu_s: user and system time of the command and of all processes that it waited for.
        tests_s: collection, and the time from the start of the second test to that of the last, if there are so many.
            Work that happens once is not in it: imports, and the start and end of processes, which every harness does
            in the first and the last test or outside of them.
        starts_s: start of each test, by its own clock.
    """

    wall_s: float
    cpu_s: float
    tests_s: float
    starts_s: Sequence[float]

    @property
    def between_s(self) -> float | None:
        """Return the median time between the starts of successive tests, without the first pair; None without any."""
        gaps = [later - earlier for earlier, later in pairwise(self.starts_s)][1:]
        return median(gaps) if gaps else None


def run_session(side: Side, tests: int, world_size: int, python: str, mpiexec: str) -> Session:
    """Generate the tests, run them with ``side``, and require that each of them passed.

    The file is collected once before, so pytest has already rewritten and cached its assertions, as in every run except
    the first after a change. Rewriting takes about a millisecond for each test, with any harness.

    Raises:
        RuntimeError: a test did not pass, so the times would mean nothing.
    """
    with tempfile.TemporaryDirectory(prefix="pdlcheck-peers-") as folder:
        home = Path(folder)
        (home / "test_sums.py").write_text(side.source(tests, world_size))
        (home / "conftest.py").write_text(side.conftest + _CLOCK)
        (home / "pytest.ini").write_text("[pytest]\n")
        if not side.starts_processes:  # with processes to start, rewriting does not matter
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
    """Return the same environment for every side.

    It has no plugin except the side's own, one thread a rank, and compiled tests cached as users have them.
    """
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
