"""Threads of a watched rank do not preempt one another on a core; the user's own settings for them stay.

Unwatched ranks keep the scheduling that torch gives them, unless the world has ``take_turns=True``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from pdlcheck.worlds import get_world

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux: its policies of scheduling")


def policies():
    """Return names and policies of all threads after a step that starts threads: groups, backward, collectives."""
    torch.ones(1, requires_grad=True).sum().backward()
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    names, found = set(), set()
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            names.add(file.read().strip())
        found.add(os.sched_getscheduler(int(thread)))
    return names, found


@pytest.mark.parametrize(
    ("watch", "turns", "policy"),
    [(True, None, "SCHED_BATCH"), (False, None, "SCHED_OTHER"), (False, True, "SCHED_BATCH")],
)
@pytest.mark.parametrize("isolation", ["pool", "fresh"])
def test_all_threads_of_a_watched_rank_wait_for_their_turn(watch, turns, policy, isolation):
    world = get_world("gloo", watch=watch, take_turns=turns, isolation=isolation)
    try:
        for names, found in world.run(policies, world_size=2):
            assert "pt_gloo_runloop" in names, "gloo's threads have other names in this torch"
            assert found == {getattr(os, policy)}
    finally:
        world.close()


def test_the_controller_is_left_alone():
    assert os.sched_getscheduler(0) != os.SCHED_BATCH


@pytest.mark.parametrize(("chosen", "kept"), [("OTHER", "BATCH"), ("BATCH", "BATCH"), ("IDLE", "IDLE")])
def test_what_the_user_has_chosen_stays(chosen, kept):
    program = (
        "import os\n"
        "from pdlcheck.worlds.processes.rank.batch_scheduling import take_turns\n"
        f"os.sched_setscheduler(0, os.SCHED_{chosen}, os.sched_param(0))\n"
        "take_turns()\n"
        f"assert os.sched_getscheduler(0) == os.SCHED_{kept}, os.sched_getscheduler(0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
