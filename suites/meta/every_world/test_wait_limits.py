"""A wait with a time limit ends, is no deadlock, and leaves the same state as on gloo."""

from __future__ import annotations

import pytest

COLLECTIVES = """
import time
from datetime import timedelta
HALF = timedelta(seconds=0.5)

@W
def test_a_collective_can_be_waited_for_again(rank):
    got = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(got, async_op=True)
        with pytest.raises(RuntimeError, match="Operation timed out! 0.5 s have passed in all_reduce.*test_inner.py"):
            work.wait(HALF)
        time.sleep(0.5)
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(got)
    assert got == 2
    dist.barrier()

@W
def test_in_time(rank):
    if rank == 0:
        got = torch.zeros(1)
        assert dist.irecv(got, 1).wait(timedelta(seconds=20))
        assert got == 1
    else:
        time.sleep(0.2)
        dist.isend(torch.ones(1), 0).wait(timedelta(seconds=20))

@W
def test_the_shortest_of_several_limits_ends_first(rank):
    work = dist.irecv(torch.ones(1), 1 - rank, tag=5)
    if rank == 0:
        sums = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(RuntimeError, match="Operation timed out"):
            sums.wait(HALF)
        dist.send(torch.ones(1), 1, tag=5)
    else:
        work.wait(timedelta(seconds=20))
        dist.send(torch.ones(1), 0, tag=5)
        dist.all_reduce(torch.ones(1))
    if rank == 0:
        work.wait()
        sums.wait()

@W
def test_a_limit_that_nobody_catches_fails_the_test(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True).wait(HALF)
    else:
        dist.recv(torch.ones(1), 0)
"""

MESSAGES = """
@W
def test_after_a_message_the_group_is_of_no_use(rank):
    group = dist.new_group()
    if rank == 0:
        work = dist.irecv(torch.zeros(1), 1, group=group)
        with pytest.raises(RuntimeError, match="Timed out waiting 500ms for recv operation"):
            work.wait(HALF)
        with pytest.raises(RuntimeError, match="Application timeout caused pair closure"):
            work.wait()
        time.sleep(0.5)
    dist.barrier()
    if rank:
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            dist.send(torch.ones(1), 0, group=group)
    with pytest.raises(RuntimeError, match="Connection closed by peer|Application timeout caused pair closure"):
        dist.barrier(group=group)
    dist.barrier()
"""


@pytest.mark.parametrize("world", ["sim", "gloo", "mpi"])
def test_a_wait_with_a_limit_ends_and_is_no_deadlock(run, world):
    messages = "" if world == "mpi" else MESSAGES
    result = run(COLLECTIVES + messages + "\n@W\ndef test_after(): dist.barrier()\n", world=world)
    result.assert_outcomes(passed=4 if world == "mpi" else 5, failed=1)
    words = "*RuntimeError: Operation timed out! 0.5 s have passed in all_reduce*"
    result.stdout.fnmatch_lines([words, "*rank 0 of 2 raised this*"])


STORE = """
from datetime import timedelta
HALF = timedelta(seconds=0.5)

def of_the_default_group():
    return dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())

@W
def test_a_key_that_nobody_sets(rank):
    store = of_the_default_group()
    if rank == 0:
        with pytest.raises(dist.DistStoreError, match="wait timeout after 500ms, keys: .*missing"):
            store.wait(["missing"], HALF)
    dist.barrier()
    store.set(f"here {rank}", "x")
    store.wait([f"here {1 - rank}"], timedelta(seconds=20))
    assert store.get(f"here {1 - rank}") == b"x"

@W
def test_a_key_that_comes_after_the_limit(rank):
    store = of_the_default_group()
    if rank == 0:
        with pytest.raises(dist.DistStoreError, match="wait timeout"):
            store.wait(["late"], HALF)
        dist.barrier()
        assert store.get("late") == b"x"
    else:
        dist.barrier()
        store.set("late", "x")

@W
def test_a_limit_that_nobody_catches_fails_the_test(rank):
    if rank == 0:
        of_the_default_group().wait(["missing"], HALF)
"""

DEADLOCK = """
@W
def test_without_a_limit():
    dist.distributed_c10d._get_default_store().get("missing")
"""

OWN_LIMIT = """
from datetime import timedelta

@W
def test_the_limit_of_the_store(rank):
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(dist.DistStoreError, match="wait timeout after 500ms, keys: .*missing"):
        store.get("missing")
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_wait_in_the_store_with_a_limit_ends_and_is_no_deadlock(run, world):
    result = run(STORE + "\n@W\ndef test_after(): dist.barrier()\n", world=world)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*DistStoreError: wait timeout after 500ms, keys: *missing*", "*rank 0 of 2 raised*"])


def test_a_wait_in_the_store_without_a_limit_is_a_deadlock_and_set_timeout_sets_one(run):
    result = run(DEADLOCK + OWN_LIMIT, world="sim")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*ranks 0, 1: blocked in store.wait for '*missing'*"])
