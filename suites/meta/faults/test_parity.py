"""Faults on the simulated cluster give survivors gloo's errors of a process that dies, stops or never joins.

An error of a collective's time limit names sending or receiving, which depends on gloo's algorithm.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from pdlcheck.faults import Absent, Kill, Stall
from pdlcheck.worlds import get_world

from ..clone import ROOT
from . import loss_programs
from .gloo_losses import WORLD_SIZE, Case, recorder

FAULTS = {"kill": Kill, "stall": Stall}
MESSAGES = ("receive_from_the_lost", "send_to_the_lost", "survivors_talk_on")
PROGRAMS = {  # program -> the operation at which rank 1 is lost
    "broadcast_from_the_lost": 0,
    "exchange": 1,
    "group_with_the_lost": 1,
    "meet_twice": 0,
    "receive_from_the_lost": 1,
    "reduce_again": 1,
    "reduce_in_a_group_that_was_there": 1,
    "reduce_to_rank_0": 0,
    "regroup": 1,
    "send_to_the_lost": 1,
    "survivors_talk_on": 1,
    "wait_for_futures": 0,
}
CASES = [
    *(Case(program, how, at) for how in FAULTS for program, at in PROGRAMS.items()),
    *(Case(name, how, 1, lost, True) for how in FAULTS for name in ("monitor", "monitor_all") for lost in (0, 1)),
    *(Case("rendezvous", "absent", 0, lost) for lost in range(WORLD_SIZE)),
]
# ranks of a broadcast may only communicate with the root: that depends on gloo's algorithm; on sim it needs all ranks
DIFFERENT = [Case("broadcast_to_the_lost", how) for how in FAULTS]


RUNS = 3  # on a busy machine a process may come too late, and gloo's errors are others


@pytest.fixture(scope="module")
def real():
    """Return the results of gloo: case -> rank -> the results of its operations."""
    return _on_gloo([*CASES, *DIFFERENT])


def _on_gloo(cases):
    command = [sys.executable, "-m", f"{__package__}.gloo_losses", json.dumps(cases)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ended = [{int(rank): told for rank, told in ranks.items()} for ranks in json.loads(done.stdout)]
    return dict(zip(cases, ended, strict=True))


class LostFirst:
    """A schedule that runs the lost rank while it can run, so that its peers detect a kill."""

    every_step = False
    every_post = False

    def __init__(self, lost):
        self._lost = lost

    def begin(self, world_size):
        pass

    def choose(self, point):
        return self._lost if self._lost in point.runnable else point.runnable[0]


def simulated(case):
    fault = Absent(case.lost) if case.how == "absent" else FAULTS[case.how](case.lost, case.at)

    def program():
        told = []
        getattr(loss_programs, case.program)(recorder(told), int(os.environ["RANK"]))
        return told

    ended = get_world("sim", schedule=LostFirst(case.lost), faults=[fault]).run(program, world_size=WORLD_SIZE)
    return {rank: told for rank, told in enumerate(ended) if rank != case.lost}


def plain(told, program):
    """Return the text without the parts that vary from run to run."""
    words = re.sub(r"\[(sim|/[^\]]*)\] ", "", told)
    words = re.sub(r"(Connection closed by peer|\w+ error .*: Connection reset by peer).*", LOST, words)
    words = re.sub(r"\d+ ?ms", "N ms", words)
    words = re.sub(r"\(\S+, \d+\)", "(ADDRESS)", words)
    return words if program in MESSAGES else re.sub("(send|recv) operation", "operation", words)


def _whoever_was_first(told):
    """Merge the errors after a time limit.

    The survivor whose limit elapses first closes its connections; the others see that, or their own limit.
    """
    given_up = (TIMED_OUT, "RuntimeError: connection lost", "RuntimeError: Application timeout caused pair closure")
    return {rank: ["given up" if one in given_up else one for one in of_rank] for rank, of_rank in told.items()}


def _on_time(told, expected):
    """Return gloo's results for ranks that reach a monitored barrier before they detect the loss.

    A rank that detects it without rank 0, which has left, only gets an error of its connection. Rank 0 names the rank
    if it
    detects the loss while it waits for all; otherwise it gets an error of its connection.
    """
    lost, late = f"RuntimeError: {LOST}", dict(expected)
    for rank, of_rank in told.items():
        heard = expected[rank][-1]
        if heard == lost and of_rank[-1].endswith(f": \n{LOST}"):
            late[rank] = [*expected[rank][:-1], of_rank[-1]]
        if rank == 0 and of_rank[-1] == lost and "failed to pass monitoredBarrier" in heard:
            late[rank] = [*expected[rank][:-1], lost]
    return late


def _name(case):
    return f"{case.program}-{case.how}-{case.lost}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_survivors_are_told_what_gloo_tells(real, case):
    on_sim = simulated(case)
    for run in range(RUNS):
        told, expected = _compared(case, on_sim, real[case] if run == 0 else _on_gloo([case])[case])
        if told == expected:
            break
    assert told == expected, f"gloo ran {RUNS} times, this is the last"
    well = all(one == "ok" for one_rank in told.values() for one in one_rank)
    assert well == (case.program in ("regroup", "survivors_talk_on"))


def _compared(case, on_sim, on_gloo):
    """Return the results of both without what differs from run to run."""
    told, expected = (
        {rank: [plain(one, case.program) for one in of_rank] for rank, of_rank in world.items()}
        for world in (on_sim, on_gloo)
    )
    if case.how == "stall" and case.program not in MESSAGES:
        late = [any(TIMED_OUT in of_rank for of_rank in side.values()) for side in (told, expected)]
        if late[0] == late[1]:
            told, expected = map(_whoever_was_first, (told, expected))
    elif case.program in ("monitor", "monitor_all"):
        expected = _on_time(told, expected)
    return told, expected


@pytest.mark.parametrize("case", DIFFERENT, ids=_name)
def test_where_they_are_not_it_is_known(real, case):
    told, expected = ([plain(one, "") for one in ranks[2]] for ranks in (simulated(case), real[case]))
    assert told == ["RuntimeError: connection lost" if case.how == "kill" else TIMED_OUT]
    assert expected == ["ok"] or (case.how == "kill" and expected == [TIMED_OUT])  # once it has detected the kill


LOST = "connection lost"
TIMED_OUT = "RuntimeError: Timed out waiting N ms for operation to complete"
