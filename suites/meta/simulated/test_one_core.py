"""Simulated ranks stay on one core with one computing thread each, and no other threads do."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pdlcheck.worlds import get_world
from pdlcheck.worlds.simulated.process_state import gauss_cache, streams

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
needs_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@needs_cores
def test_ranks_share_one_core_and_the_controller_keeps_all():
    cores = get_world("sim").run(lambda: os.sched_getaffinity(0), world_size=3)
    assert len(cores[0]) == 1
    assert cores == [cores[0]] * 3
    assert os.sched_getaffinity(0) == CORES


@needs_cores
def test_the_controller_has_its_cores_back_after_a_failure():
    with pytest.raises(ZeroDivisionError):
        get_world("sim").run(lambda: 1 / 0, world_size=2)
    assert os.sched_getaffinity(0) == CORES


@needs_cores
def test_a_process_that_a_rank_forks_has_all_cores():
    def forks():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if os.sched_getaffinity(0) == CORES else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert get_world("sim").run(forks, world_size=2) == [0, 0]


@pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER,
    reason="needs the usual scheduler of Linux",
)
def test_ranks_do_not_preempt_one_another_and_what_they_fork_is_as_the_controller():
    def policies():
        pid = os.fork()
        if pid == 0:
            os._exit(os.sched_getscheduler(0))
        return os.sched_getscheduler(0), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert get_world("sim").run(policies, world_size=2) == [(os.SCHED_BATCH, os.SCHED_OTHER)] * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_every_rank_computes_with_one_thread_or_as_many_as_it_says():
    def threads():
        before = torch.get_num_threads()
        if dist.get_rank() == 0:
            torch.set_num_threads(3)
        dist.barrier()
        return before, torch.get_num_threads()

    own = torch.get_num_threads()
    for _ in range(2):
        assert get_world("sim").run(threads, world_size=2) == [(1, 3), (1, 1)]
        with ThreadPoolExecutor(1) as pool:
            assert [torch.get_num_threads(), pool.submit(torch.get_num_threads).result()] == [own, own]


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 1000])
def test_the_stream_of_random_goes_on_where_it_was(drawn):
    own = random.getstate()
    try:
        random.seed(7)
        for _ in range(drawn):
            random.getrandbits(32)
        random.gauss(0, 1)  # keeps a second value for the next call
        state, expected = streams.python_stream(), random.getstate()
        assert streams.python_stream(state) is state
        following = [random.gauss(0, 1), random.random()]
        random.seed(8)
        assert streams.python_stream(state) != state
        streams.set_python_stream(state)
        assert random.getstate() == expected
        assert [random.gauss(0, 1), random.random()] == following
    finally:
        random.setstate(own)


@pytest.mark.parametrize(
    "change", [lambda: random.seed(8), lambda: random.getrandbits(32 * 624), lambda: random.gauss(0, 1)]
)
def test_a_stream_that_has_changed_is_told_from_the_last_one(change):
    own = random.getstate()
    try:
        random.seed(7)
        random.gauss(0, 1)
        state = streams.python_stream()
        change()
        changed, expected = streams.python_stream(state), random.getstate()
        assert changed != state
        streams.set_python_stream(state)
        streams.set_python_stream(changed)
        assert random.getstate() == expected
    finally:
        random.setstate(own)


def test_streams_of_another_layout_are_told_apart(monkeypatch):
    class IndexLast(ctypes.Structure):
        _fields_ = (("numbers", ctypes.c_uint32 * 624), ("index", ctypes.c_int))

    assert streams.is_laid_out_as_known(random.Random(1))
    assert not streams.is_laid_out_as_known(random.SystemRandom())
    assert not streams.is_laid_out_as_known(None)
    monkeypatch.setattr(streams, "_Layout", IndexLast)
    assert not streams.is_laid_out_as_known(random.Random(1))


@pytest.fixture(params=["by its place", "by asking numpy"])
def kept(request, monkeypatch):
    """Return the module, which finds numpy's kept number by its place, or by asking numpy if the place is unknown."""
    if request.param == "by its place":
        return gauss_cache
    monkeypatch.setattr(np.random, "RandomState", type("RandomState", (), {}))
    spec = importlib.util.spec_from_file_location("asking", gauss_cache.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("drawn", [0, 1, 2, 3])
def test_the_normal_number_that_numpy_keeps_is_kept_for_another_bit_generator(kept, drawn):
    own, generator = np.random.get_state(), np.random.get_bit_generator()
    try:
        np.random.seed(7)
        np.random.randn(drawn)
        state, expected = kept.cached_gauss(), np.random.get_state()
        following = np.random.randn(3)
        np.random.set_bit_generator(np.random.MT19937())
        np.random.set_state((*expected[:3], 0, 0.0))
        kept.set_cached_gauss(state)
        assert np.random.get_state()[3:] == expected[3:]
        assert np.array_equal(np.random.randn(3), following)
    finally:
        np.random.set_bit_generator(generator)
        np.random.set_state(own)


def test_where_numpy_keeps_it_is_found_or_not_used():
    place = gauss_cache.place_of_kept_normal(np.random.mtrand._rand)
    assert place is not None
    assert place + 16 <= np.random.RandomState.__basicsize__
    assert gauss_cache.place_of_kept_normal(np.random.default_rng()) is None
    assert gauss_cache.place_of_kept_normal(None) is None
