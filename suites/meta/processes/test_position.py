"""The position of a rank's thread, while other threads of the process continue."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from pdlcheck.worlds import stack_position

DEPTH = 400  # calls: enough for another thread to run before all of them are read


@pytest.fixture
def hurried():
    """Make threads request the interpreter all the time."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.fixture
def deep_thread():
    """Yield a thread that waits in a recursive function."""
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
    """Yield the count of another thread, which counts as fast as it can."""
    count, ended = SimpleNamespace(value=0), threading.Event()

    def go_on():
        while not ended.is_set():
            count.value += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    yield count
    ended.set()
    thread.join()


@pytest.fixture(params=[True, False], ids=["collects", "does not collect"])
def collects(request):
    """Return whether Python collects garbage; if so, each new object starts a collection."""
    usual = gc.get_threshold()
    gc.set_threshold(1)
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()
    gc.set_threshold(*usual)


def test_nobody_runs_while_the_frames_of_a_thread_are_looked_at(hurried, deep_thread, counter, monkeypatch):
    reads_the_counter = partial(getattr, counter, "value")  # C code, which gets the frame as the default
    monkeypatch.setattr(stack_position, "_ITS_PLACE", reads_the_counter)
    seen = set()
    while len(seen) < 200:  # moments at which the other thread had run
        counts = [count for _, count in stack_position._frames_of(deep_thread.ident)]
        assert len(counts) > DEPTH
        assert len(set(counts)) == 1
        seen.update(counts)


@pytest.mark.slow
def test_nor_does_anybody_where_a_hook_is_told_of_what_python_does():
    """Such hooks are Python code; filelock, which comes with torch, adds one, and none can be removed."""
    inside = [__file__, "-q", "-p", "no:cacheprovider", "-k", "test_nobody_runs_while"]
    code = f"import pytest, sys; sys.addaudithook(lambda event, arguments: None); sys.exit(pytest.main({inside}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    assert "1 passed" in ended.stdout


def test_no_garbage_is_collected_while_the_frames_of_a_thread_are_looked_at(deep_thread, collects):
    """A finalizer would let the thread continue, and CPython 3.11 may then read a frame that has ended."""
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        frames = stack_position._frames_of(deep_thread.ident)
    finally:
        gc.callbacks.pop()
    assert len(frames) > DEPTH
    assert len(collections) < DEPTH / 10
    assert gc.isenabled() == collects


def test_the_stack_of_a_thread_leads_to_where_it_is(deep_thread):
    place = stack_position.place_of(deep_thread.ident)
    assert place.stack.count("in descend\n    descend(depth - 1)") == 3  # plus a line with the number of repeats
    assert "in descend\n    leave.wait()" in place.stack


def test_a_thread_that_is_gone_is_nowhere(deep_thread):
    assert stack_position.place_of(-1).words == ""
    assert stack_position.place_of(deep_thread.ident).mark == stack_position.place_of(deep_thread.ident).mark
