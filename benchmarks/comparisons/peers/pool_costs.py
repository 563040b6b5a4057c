"""What only a pool has: its start-up by itself, and its overhead over a suite of real tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from peers.real_tests import BODIES, CASES
from peers.sessions import run_session
from peers.sides import REAL_TESTS

__all__ = ["bare_suite_s", "pool_start_s", "pool_suite_s"]


def pool_start_s(world_size: int) -> float:
    """Seconds until ``world_size`` ranks have a default group, with the fork server up and nothing else."""
    from pdlcheck.worlds import get_world

    world, other = get_world("gloo"), get_world("gloo")
    try:
        other.run(os.getpid, world_size=1)  # the server is up after that, and stays for `other`
        start = time.perf_counter()
        with world.open(world_size):
            return time.perf_counter() - start
    finally:
        world.close()
        other.close()


def pool_suite_s(world_size: int) -> float:
    """Seconds for the real tests in a pytest session on a pool, from the begin of the first to the end of the last."""
    starts = run_session(REAL_TESTS, CASES, world_size, sys.executable, "").starts_s
    return starts[-1] - starts[len(BODIES)]  # the first ones warm up, the last one is empty


def bare_suite_s(world_size: int, *, takes_turns: bool = False) -> float:
    """Seconds for the same bodies in a loop on gloo; ``takes_turns``: under the scheduling policy of a pool's ranks."""
    policy = ["--take-turns"] if takes_turns else []
    done = subprocess.run(
        [sys.executable, "-m", "peers.bare_loop", str(world_size), *policy],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])
