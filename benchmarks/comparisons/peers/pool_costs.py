"""Costs that only a pool has: its start-up, and its overhead over a suite of real tests."""

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
    """Return the seconds until ``world_size`` ranks have a default group, with only the fork server up."""
    from pdlcheck.worlds import get_world

    world, other = get_world("gloo"), get_world("gloo")
    try:
        other.run(os.getpid, world_size=1)  # starts the server, which then stays up for `other`
        start = time.perf_counter()
        with world.open(world_size):
            return time.perf_counter() - start
    finally:
        world.close()
        other.close()


def pool_suite_s(world_size: int) -> float:
    """Return the seconds of the real tests in a session on a pool, from the first start to the last end."""
    starts = run_session(REAL_TESTS, CASES, world_size, sys.executable, "").starts_s
    return starts[-1] - starts[len(BODIES)]  # the first tests warm up, the last one is empty


def bare_suite_s(world_size: int, *, takes_turns: bool = False) -> float:
    """Return the seconds of the same bodies in a loop on gloo.

    With ``takes_turns`` its threads have the scheduling policy of a pool's ranks.
    """
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
