"""Operations complete while their rank does other work, and no half of one remains when a rank fails."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import PeerFailed
from pdlcheck.operations.table import METHODS
from pdlcheck.worlds import get_world
from pdlcheck.worlds.observe import Operation, Signature
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.exchange.agreement import ABSENT, ASKS, GOES, POSTED, WAITS
from pdlcheck.worlds.processes.exchange.board import place_of
from pdlcheck.worlds.processes.exchange.meeting import Meetings
from pdlcheck.worlds.processes.exchange.messages import Asks, Refuse
from pdlcheck.worlds.processes.rank.coordinator import OperationCoordinator

from ..needs_mpi import needs_mpi


@pytest.fixture(scope="module", params=["gloo", pytest.param("mpi", marks=needs_mpi)])
def processes(request):
    world = get_world(request.param)
    yield world
    world.close()


def isend(tensor):
    return dist.isend(tensor, 1)


def irecv(tensor):
    return dist.irecv(tensor, 1)


def all_reduce(tensor):
    return dist.all_reduce(tensor, async_op=True)


def waits(tensor):
    dist.all_reduce(tensor)


def polls(tensor):
    until(dist.all_reduce(tensor, async_op=True).is_completed)


def is_called_back(tensor):
    called = []
    dist.all_reduce(tensor, async_op=True).get_future().then(called.append)
    until(lambda: called)


PARTNERS = [
    (isend, lambda tensor: dist.recv(tensor, 0), [1.0] * 3),
    (irecv, lambda tensor: dist.send(tensor, 0), [2.0] * 3),
    (all_reduce, waits, [3.0] * 3),
    (all_reduce, polls, [3.0] * 3),
    (all_reduce, is_called_back, [3.0] * 3),
]
partners = pytest.mark.parametrize(
    ("post", "partner", "expected"), PARTNERS, ids=["isend", "irecv", "waits", "polls", "is_called_back"]
)


def until(happens) -> None:
    end = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < end, "it did not go on"
        time.sleep(0.001)


def hears_of_it_by_a_file(post, partner, delays, path):
    """Post on rank 0, and wait only after a file, not torch, shows that rank 1 has finished."""
    tensor = torch.full((3,), 1.0 + dist.get_rank())
    time.sleep(delays[dist.get_rank()])
    if dist.get_rank() == 0:
        work = post(tensor)
        until(path.exists)
        work.wait()
    else:
        partner(tensor)
        path.touch()
    return tensor.tolist()


@partners
@pytest.mark.parametrize("delays", [(0.0, 0.01), (0.01, 0.0)], ids=["this one first", "the other one first"])
def test_the_other_rank_gets_through_while_this_one_is_about_something_else(
    processes, post, partner, expected, delays, tmp_path
):
    found = processes.run(hears_of_it_by_a_file, post, partner, delays, tmp_path / "through", world_size=2)
    assert found == [expected] * 2


def waits_for_it(work):
    work.wait()


def polls_it(work):
    until(work.is_completed)


def puts_something_behind_it(work):
    called = []
    work.get_future().then(called.append)
    until(lambda: called)


def both_call_it_the_same(ends, delays, path):
    """Call all_reduce on both ranks under one name, so that rank 1 finds on the board that it may launch."""
    tensor = torch.full((3,), 1.0 + dist.get_rank())
    time.sleep(delays[dist.get_rank()])
    work = dist.all_reduce(tensor, async_op=True)
    if dist.get_rank() == 0:
        until(path.exists)
        work.wait()
    else:
        ends(work)
        path.touch()
    return tensor.tolist()


@pytest.mark.parametrize("ends", [waits_for_it, polls_it, puts_something_behind_it], ids=lambda ends: ends.__name__)
@pytest.mark.parametrize("delays", [(0.0, 0.01), (0.01, 0.0)], ids=["this one first", "the other one first"])
def test_the_other_rank_gets_through_that_sees_this_one_there(processes, ends, delays, tmp_path):
    found = processes.run(both_call_it_the_same, ends, delays, tmp_path / "through", world_size=2)
    assert found == [[3.0] * 3] * 2


def calls_the_first_one_otherwise() -> float:
    """Name the first tensor differently on each rank.

    The controller must compare such operations, and later ones must not overtake them.
    """
    if dist.get_rank() == 0:
        mine = torch.ones(3)
        pending = dist.all_reduce(mine, async_op=True)
    else:
        yours = torch.ones(3)
        pending = dist.all_reduce(yours, async_op=True)
    total = torch.full((3,), 2.0)
    dist.all_reduce(total)
    pending.wait()
    return total[0].item()


def test_a_rank_that_waits_has_what_is_before_it_judged(processes):
    assert processes.run(calls_the_first_one_otherwise, world_size=2) == [4.0, 4.0]


def returns_at_once(post, partner):
    if dist.get_rank() == 0:
        post(torch.ones(3))
    else:
        time.sleep(0.05)
        partner(torch.ones(3))


@partners
def test_the_other_rank_gets_through_when_this_one_has_returned_without_waiting(processes, post, partner, expected):
    pids = processes.pids(2)
    processes.run(returns_at_once, post, partner, world_size=2)
    assert processes.run(sums, world_size=2) == [2.0, 2.0]
    assert processes.pids(2) == pids


def is_slow_to_read(seconds):
    """Return on rank 0 before its message arrives, and slow down the thread that reads the message."""
    if dist.get_rank() == 0:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        subprocess.Popen(["timeout", str(seconds), "sh", "-c", "while :; do :; done"])
        os.sched_setaffinity(0, cores)
        for thread in Path("/proc/self/task").iterdir():
            if "gloo_tcp" in (thread / "comm").read_text():
                os.sched_setaffinity(int(thread.name), {min(cores)})
                os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
        dist.irecv(torch.empty(3), 1)
    else:
        time.sleep(0.05)
        dist.send(torch.ones(3), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: it slows one thread of a process down")
def test_a_message_that_nobody_awaits_arrives_before_the_next_call():
    with contextlib.closing(ProcessWorld("gloo", timeout_s=20)) as world:
        world.run(is_slow_to_read, 0.3, world_size=2)
        assert world.run(sums, world_size=2) == [2.0, 2.0]


def leaves_it(delays):
    time.sleep(delays[dist.get_rank()])
    dist.all_reduce(torch.ones(3), async_op=True)


@pytest.mark.parametrize("delays", [(0.0, 0.02), (0.02, 0.0), (0.0, 0.0)], ids=["first", "last", "at once"])
def test_what_no_rank_waits_for_is_no_half_of_an_operation_afterwards(processes, delays):
    pids = processes.pids(2)
    processes.run(leaves_it, delays, world_size=2)
    assert processes.run(sums, world_size=2) == [2.0, 2.0]
    assert processes.pids(2) == pids


def sums() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def never_waits(partner) -> float:
    total = torch.ones(1)
    time.sleep(0.005 * dist.get_rank())
    partner(total)
    return total.item()


@pytest.mark.parametrize("partner", [polls, is_called_back], ids=lambda partner: partner.__name__)
def test_ranks_that_never_wait_get_through(processes, partner):
    assert processes.run(never_waits, partner, world_size=2) == [2.0, 2.0]


def has_many_pending(number: int) -> float:
    me, found = dist.get_rank(), [torch.empty(1) for _ in range(number)]
    works = []
    for tag, tensor in enumerate(found):
        works += [dist.isend(torch.ones(1), 1 - me, tag=tag), dist.irecv(tensor, 1 - me, tag=tag)]
    for work in works:
        work.wait()
    return sum(tensor.item() for tensor in found)


def test_more_pending_messages_than_are_looked_at_at_a_time(processes):
    assert processes.run(has_many_pending, 1200, world_size=2) == [1200.0, 1200.0]


def place(op: str, rank: int, tag: int) -> int:
    """Return the board's word of a message between ranks 0 and 1 in the current call."""
    group = dist.group.WORLD
    signature = Signature(
        rank, op, group.group_name, (0, 1), shapes=((1,),), dtypes=("float32",), peer=1 - rank, tag=tag
    )
    return place_of(Meetings(group._engine._coordinator.call).of(signature).digest)


def has_two_messages_in_one_word() -> list[float]:
    """Exchange two messages that share a word of the board.

    Rank 0 sees rank 1's first message there; rank 1 overwrites its word after rank 0 has overwritten its own.
    """
    first, second, third = tensors = [torch.full((1,), 3.0 * dist.get_rank() + number) for number in range(3)]
    taken = place("send", 1, 1)
    tag = next(tag for tag in itertools.count(2) if place("send", 0, tag) == taken)
    ready = torch.tensor([time.monotonic() + 0.1], dtype=torch.float64)  # the search for the tag takes a second
    dist.all_reduce(ready, dist.ReduceOp.MAX)
    start = ready.item()
    if dist.get_rank() == 1:
        sent = dist.isend(first, 0, tag=1)
        until(lambda: time.monotonic() > start + 0.005)
        works = [sent, dist.irecv(second, 0, tag=tag)]
        dist.recv(third, 0)
    else:
        until(lambda: time.monotonic() > start)
        received, *works = dist.irecv(first, 1, tag=1), dist.isend(second, 1, tag=tag)
        received.wait()
        dist.send(third, 1)
    for work in works:
        work.wait()
    return [tensor.item() for tensor in tensors]


def test_messages_that_share_a_word_of_the_board_arrive(processes):
    for _ in range(3):
        expected = [3.0, 1.0, 2.0]
        assert processes.run(has_two_messages_in_one_word, world_size=2) == [expected] * 2


def fails_with_operations_pending(posts_first: bool) -> None:
    """Fail with the first operations posted on both ranks, and the last one on rank 1 only."""
    pending = []
    if dist.get_rank() == 0 and not posts_first:
        raise LookupError("rank 0 found nothing")
    pending = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    if dist.get_rank() == 0:
        time.sleep(0.02)
        raise LookupError("rank 0 found nothing")
    dist.all_reduce(torch.ones(3))
    del pending


def fails_while_the_other_one_computes(posts_first: bool) -> None:
    time.sleep(0.0 if posts_first == (dist.get_rank() == 0) else 0.01)
    pending = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    if dist.get_rank() == 0:
        raise LookupError("rank 0 found nothing")
    time.sleep(0.05)
    del pending


@pytest.mark.parametrize("posts_first", [True, False])
@pytest.mark.parametrize("function", [fails_with_operations_pending, fails_while_the_other_one_computes])
def test_a_failure_leaves_no_half_of_an_operation(processes, function, posts_first):
    pids = processes.pids(2)
    for _ in range(5):
        with pytest.raises(LookupError, match="rank 0 found nothing"):
            processes.run(function, posts_first, world_size=2)
        assert processes.run(sums, world_size=2) == [2.0, 2.0]
    assert processes.pids(2) == pids


def fails_as_its_operation_is_let_go() -> None:
    """Fail on rank 0 after rank 1 has requested a grant, which the controller gives once rank 0 has posted."""
    if dist.get_rank() == 0:
        time.sleep(0.05)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if dist.get_rank() == 0:
        raise LookupError("rank 0 found nothing")
    work.is_completed()
    time.sleep(0.2)


def test_an_operation_that_only_the_other_rank_was_let_go_with_is_not_waited_for_afterwards(processes):
    for _ in range(8):
        with pytest.raises(LookupError, match="rank 0 found nothing"):
            processes.run(fails_as_its_operation_is_let_go, world_size=2)
        assert processes.run(sums, world_size=2) == [2.0, 2.0]


def returns_before_the_others_come_to_its_operation(one_fails: bool) -> None:
    pair = dist.new_group([0, 1])
    rank, token = dist.get_rank(), torch.ones(1)
    if rank == 2:
        dist.recv(token, 1)
        if one_fails:
            raise LookupError("rank 2 found nothing")
        dist.send(token, 1)
        return
    if rank == 1:
        dist.recv(token, 0)
        time.sleep(0.3)  # rank 0 has returned, and no longer looks for others
    pending = dist.all_reduce(torch.ones(3), group=pair, async_op=True)
    if rank == 0:
        dist.send(token, 1)
        return
    dist.send(token, 2)
    dist.recv(token, 2)
    del pending


def test_a_rank_that_had_returned_when_another_one_failed_may_have_left_half_of_an_operation(processes):
    before = processes.pids(3)
    processes.run(returns_before_the_others_come_to_its_operation, False, world_size=3)
    assert processes.pids(3) == before
    with pytest.raises(LookupError, match="rank 2 found nothing"):
        processes.run(returns_before_the_others_come_to_its_operation, True, world_size=3)
    assert processes.run(sums, world_size=3) == [3.0] * 3
    assert set(processes.pids(3)).isdisjoint(before)


# -- the moment in which one rank goes and another one withdraws -------------------------------------


class Seen:
    """A stand-in for a board: successive states of rank 1, and a record of what rank 0 publishes."""

    def __init__(self, *states):
        self._states = list(states)
        self._digest = 0
        self.said = []

    def states(self, ranks, digest):
        if digest != self._digest:  # the digest of the place, for ranks with another operation
            return [ASKS if ASKS in self._states else ABSENT]
        return [self._states.pop(0) if len(self._states) > 1 else self._states[0]]

    def may_have_gone(self, ranks, digest):
        return GOES in self.states(ranks, digest)

    def say(self, rank, digest, state):
        self._digest = self._digest or digest
        if digest == self._digest:
            self.said.append(state)
        return 0

    def log(self, rank, entry):
        return 0

    def clear(self, rank, call):
        """Keep nothing."""


def announced(board, send=lambda report: None):
    """Post an operation of rank 0; return its coordinator, and the list of calls that reach the group."""
    signature = Signature(rank=0, op="barrier", group="0", members=(0, 1), seq=0)
    coordinator, calls = OperationCoordinator(0, 2, send, board), []
    coordinator.begin(1)
    group = SimpleNamespace(barrier=lambda: calls.append("barrier"))
    coordinator.post(Operation(signature, (), METHODS["barrier"], ()), group)
    return coordinator, calls


@pytest.mark.parametrize("state", [POSTED, WAITS, GOES])
def test_an_operation_goes_when_the_other_rank_is_there(state):
    board = Seen(state)
    assert announced(board)[1] == ["barrier"]
    assert board.said == [POSTED, GOES]


@pytest.mark.parametrize("state", [ABSENT, ASKS])
def test_an_operation_does_not_go_by_itself_when_the_other_rank_is_not_there_or_asks(state):
    assert announced(Seen(state))[1] == []


def fails(coordinator):
    coordinator.end(failed=True)


def is_told_of_a_failure(coordinator):
    coordinator.handle(Refuse(1, PeerFailed("another rank failed")))


withdraws = pytest.mark.parametrize("withdraws", [fails, is_told_of_a_failure], ids=lambda how: how.__name__)


@withdraws
def test_an_operation_does_not_go_when_the_other_rank_withdraws_at_that_moment(withdraws):
    board = Seen(POSTED, ABSENT)
    coordinator, calls = announced(board)
    assert calls == []
    assert board.said[:2] == [POSTED, GOES]
    withdraws(coordinator)
    assert board.said[-1] == ABSENT
    assert not coordinator.is_torn


def test_an_operation_of_which_the_other_rank_is_no_longer_seen_is_asked_for():
    """Another operation may have taken its word, and the other rank may believe that this one was launched."""
    sent = []
    assert announced(Seen(POSTED, ABSENT), sent.append)[1] == []
    assert sent == [Asks(1, 1, waits=False)]


def test_a_thread_that_reads_what_the_controller_sends_does_not_wait_for_it_to_read():
    """If both sides had much to send, each would wait for the other."""
    senders = []
    coordinator, _ = announced(Seen(ABSENT), lambda report: senders.append(threading.get_ident()))
    coordinator._states.in_doubt.extend(coordinator._open.values())
    coordinator.advance(elsewhere=True)
    until(lambda: senders)
    assert senders != [threading.get_ident()]


@withdraws
def test_a_rank_that_withdraws_when_the_other_one_goes_does_not_serve_another_call(withdraws):
    board = Seen(ABSENT, ABSENT, GOES)
    coordinator, calls = announced(board)
    withdraws(coordinator)
    assert calls == []
    assert board.said == [POSTED, ABSENT]
    assert coordinator.is_torn
    coordinator.begin(2)
    assert not coordinator.is_torn
