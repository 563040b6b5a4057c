"""Where a thread of a rank is, while other threads of the process go on."""

from __future__ import annotations

import sys
import threading

import pytest

from pdlcheck.worlds.processes import position

DEPTH = 400


@pytest.fixture
def hurried():
    """Threads ask for the interpreter all the time."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.fixture
def deep_thread():
    """A thread that waits in a function which called itself."""
    there, leave = threading.Event(), threading.Event()

    def descend(depth):
        if depth:
            descend(depth - 1)
        else:
            there.set()
            leave.wait()

    thread = threading.Thread(target=descend, args=(DEPTH,))
    thread.start()
    there.wait()
    yield thread
    leave.set()
    thread.join()


@pytest.fixture
def counter():
    """What another thread counts, as fast as it can."""
    count, ended = [0], threading.Event()

    def go_on():
        while not ended.is_set():
            count[0] += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    yield count
    ended.set()
    thread.join()


def test_nobody_runs_while_the_frames_of_a_thread_are_looked_at(hurried, deep_thread, counter, monkeypatch):
    """CPython 3.11 may go from a frame that ends meanwhile to any piece of memory."""
    during, frame = [], position._Frame
    monkeypatch.setattr(position, "_Frame", lambda *where: during.append(counter[0]) or frame(*where))
    for _ in range(5):
        during.clear()
        place = position.place_of(deep_thread.ident)
        assert len(during) > DEPTH
        assert len(set(during)) == 1
    assert "in descend\n    descend(depth - 1)" in place.stack
    assert sys.getswitchinterval() == pytest.approx(1e-5)


def test_a_thread_that_is_gone_is_nowhere(deep_thread):
    assert position.place_of(-1).words == ""
    assert position.place_of(deep_thread.ident).mark == position.place_of(deep_thread.ident).mark
