"""Threads of :func:`pagerank` share a round and wait for each other within it, but never for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numba
import numpy as np
import pytest
import torch

from pdlcheck.primitives.pagerank import Graph, kernels, pagerank, rounds, threads
from pdlcheck.primitives.pagerank.gathering import FIRST_COUNTER, GIVEN_UP, meet, take_next
from pdlcheck.primitives.pagerank.threads import Team

pytestmark = pytest.mark.verifies("pagerank")


@numba.njit(nogil=True)
def note_steps(counters: Any, size: int, steps: int, taken: Any, early: Any) -> None:
    """Take a number at each step, and count the numbers that were taken before another thread finished its step."""
    for step in range(steps):
        if take_next(taken, 0) // size != step:
            take_next(early, 0)
        meet(counters, size)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_nobody_goes_on_before_all_are_there(size):
    """There may be more threads than cores."""
    counters, taken, early = np.zeros(FIRST_COUNTER, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    note_steps(counters.copy(), 1, 1, taken.copy(), early.copy())  # compiles
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda _: note_steps(counters, size, 1000, taken, early), range(size)))
    assert (taken[0], early[0]) == (1000 * size, 0)


@numba.njit(nogil=True)
def wait(counters: Any, size: int) -> None:
    meet(counters, size)


def give_up(counters: Any) -> None:
    counters[GIVEN_UP] = 1


@pytest.fixture
def counters() -> Iterator[Any]:
    """Yield the counters of a meeting, which a timer gives up after 20 seconds."""
    counters, rescued = np.zeros(FIRST_COUNTER, np.int64), threading.Event()
    rescue = threading.Timer(20, lambda: (rescued.set(), give_up(counters)))
    rescue.start()
    yield counters
    rescue.cancel()
    assert not rescued.is_set(), "a thread waited for one that did not come"


class NoMemory(Exception):
    pass


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_who_fails_before_a_meeting_is_not_waited_for(monkeypatch, counters, failing):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)

    def work(member: int) -> None:
        if member == failing:
            raise NoMemory
        wait(counters, 3)

    with Team(3) as team, pytest.raises(NoMemory):
        team.run(work, give_up=partial(give_up, counters))


def test_a_thread_that_cannot_be_begun_is_not_waited_for(monkeypatch, counters):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.endswith("_1"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with Team(3) as team:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            team.run(lambda member: wait(counters, 3), give_up=partial(give_up, counters))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_round_that_fails_in_one_thread_ends_in_all(monkeypatch, failing):
    waiting = []

    def sweep(counters: Any, member: int, *arguments: Any) -> None:
        waiting.append(counters)
        if member == failing:
            raise NoMemory
        kernels.sweep(counters, member, *arguments)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(rounds, "sweep", sweep)
    rescue = threading.Timer(20, lambda: [give_up(counters) for counters in waiting])
    rescue.start()
    with pytest.raises(NoMemory):
        pagerank(many_blocks())
    assert rescue.is_alive(), "a thread waited for one that did not come"
    rescue.cancel()


def many_blocks() -> Graph:
    draw = np.random.default_rng(0)
    return Graph(draw.integers(0, 30_000, 3_000_000), draw.integers(0, 33_001, 3_000_000), 33_001)


@pytest.mark.parametrize("method", ["power", "gauss-seidel"])
def test_any_number_of_threads_finds_the_same_bits(monkeypatch, method):
    """There may be more threads than cores, as when other programs use some of them."""
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    graph, before, found = many_blocks(), torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3, 8) * 3:
            torch.set_num_threads(count)
            found.add(hash(pagerank(graph, method=method, max_iter=4).scores.tobytes()))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


ALONE = """
import time
from pdlcheck.primitives.pagerank import debian_dependencies, pagerank
graph = debian_dependencies()
pagerank(graph)
time.sleep(0.2)  # what has read the graph, or was compiled, has threads that still spin
everybody, alone = time.process_time(), time.thread_time()
for _ in range(10):
    pagerank(graph)
print((time.process_time() - everybody) / (time.thread_time() - alone))
"""


def test_a_small_graph_takes_no_other_thread_s_time():
    """The threads of BLAS, for example, spin for a while after each product."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=100, check=True)
    assert float(done.stdout) < 1.2


def test_there_are_no_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    with Team(1000) as team:
        assert team.size == threads.usable_cores() <= (os.cpu_count() or 1)


INTERRUPTED = """
import os, signal, threading
from {module} import many_blocks, pagerank
signal.signal(signal.SIGINT, signal.default_int_handler)  # which the tests may have been started without
graph = many_blocks()
pagerank(graph)
after_a_while = threading.Timer({seconds}, lambda: os.kill(os.getpid(), signal.SIGINT))
after_a_while.start()
try:
    while True:
        pagerank(graph)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.31, 0.42])
def test_ctrl_c_ends_it(seconds):
    code = INTERRUPTED.format(seconds=seconds, module=many_blocks.__module__)
    same_modules = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # pytest may have added to it
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=same_modules, capture_output=True, text=True, timeout=100)
    assert done.stdout == "interrupted\n", done.stderr
