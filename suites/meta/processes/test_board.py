"""Ranks launch operations that the board shows as ready, and the controller judges the rest."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock, PeerFailed
from pdlcheck.operations.signature import Name
from pdlcheck.operations.table import METHODS
from pdlcheck.worlds.observe import Operation, Signature
from pdlcheck.worlds.outcome import Returned
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller.arbiter import Arbiter
from pdlcheck.worlds.processes.controller.collect import Collector
from pdlcheck.worlds.processes.exchange.agreement import ABSENT, ASKS, GOES, POSTED
from pdlcheck.worlds.processes.exchange.board import Board, digest_of, place_of, shared_file
from pdlcheck.worlds.processes.exchange.meeting import Meetings
from pdlcheck.worlds.processes.exchange.messages import (
    Aftermath,
    Asks,
    Done,
    Failed,
    Grant,
    Halted,
    LogHalfFull,
    Posted,
    Refuse,
    StopMatching,
)
from pdlcheck.worlds.processes.exchange.own_time import OwnTime
from pdlcheck.worlds.processes.rank.coordinator import OperationCoordinator

MANY = 2000  # more than a log holds
LINE = os.path.basename(__file__)


@pytest.fixture(scope="module")
def processes():
    world = ProcessWorld()
    yield world
    world.close()


@pytest.fixture
def board():
    fd = shared_file(2)
    board = Board(fd, 2)
    os.close(fd)
    yield board
    board.close()


# -- the shared memory -----------------------------------------------------------------------------


def test_a_word_is_seen_by_all_views(board):
    board.say(1, 4096, POSTED)
    assert board.states([0, 1], 4096) == [ABSENT, POSTED]
    board.say(1, 4096, ASKS)
    assert board.states([1], 4096) == [ASKS]
    assert board.states([1], 4096 + (1 << 40)) == [0], "another operation in the same place"
    board.say(1, 4096 + (1 << 40), GOES)
    assert board.states([1], 4096) == [0], "an older one gives way"


def test_an_operation_whose_word_another_one_of_the_call_has_taken_may_have_gone(board):
    one, other, earlier = digest_of(3, "one"), digest_of(3, "other"), digest_of(2, "one")
    place = one & ~0x7F8 & 2**27 - 1  # the bits that select the word
    other, earlier = (digest & ~(2**27 - 1 & ~0x7F8) | place for digest in (other, earlier))
    assert place_of(one) == place_of(other) == place_of(earlier)
    said = [(earlier, GOES), (one, POSTED), (other, POSTED), (one, GOES), (other, POSTED)]
    for (digest, state), may in zip(said, [False, False, False, True, True], strict=True):
        board.say(1, digest, state)
        assert board.may_have_gone([1], one) == may
    board.clear(1, 4)
    assert not board.may_have_gone([1], one)


def test_a_log_is_read_in_pieces_and_refuses_what_does_not_fit(board):
    assert board.log(1, "one") is not None
    assert board.log(1, "two") is not None
    assert board.take(1, 0) == ["one", "two"]
    assert board.log(1, "three") is not None
    assert board.log(1, "x" * 2**20) is None
    assert board.take(1, 0) == ["three"]
    board.clear(1, 7)
    assert board.take(1, 7) == []
    assert board.log(1, "of the next call") is not None
    assert board.take(1, 0) == [], "a rank that has begun another call is not read for this one"
    assert board.take(1, 7) == ["of the next call"]


def test_a_log_goes_round(board):
    board.clear(0, 3)
    taken, told = [], 0
    for number in range(5000):
        halves = board.log(0, (number, "x" * (number % 700)))
        if halves > told:
            told = halves
            taken += board.take(0, 3)
    taken += board.take(0, 3)
    assert taken == [(number, "x" * (number % 700)) for number in range(5000)]
    assert told > 10


def test_a_log_that_nobody_reads_is_full_once_and_goes_on_where_it_was(board):
    board.clear(0, 3)
    kept = 0
    while board.log(0, kept) is not None:
        kept += 1
    assert board.log(0, kept) is None
    assert board.take(0, 3) == list(range(kept))
    assert board.log(0, kept) is not None
    assert board.take(0, 3) == [kept]


# -- who meets -------------------------------------------------------------------------------------


def collective(rank: int, **others) -> Signature:
    given = {"op": "all_reduce", "group": "0", "members": (0, 1), "seq": 3, "shapes": ((2,),), "dtypes": ("float32",)}
    return Signature(**{"rank": rank, "reduce_op": "SUM", "where": f"train.py:{rank}", **given, **others})


def digests(first: Signature, second: Signature, calls: tuple[int, int] = (1, 1)) -> list[int | None]:
    return [
        meeting and meeting.digest
        for meeting in (Meetings(call).of(signature) for call, signature in zip(calls, (first, second), strict=True))
    ]


def test_equal_calls_meet_from_whatever_line():
    one, other = digests(collective(0), collective(1))
    assert one == other
    assert Meetings(1).of(collective(1)).others == (0,)


@pytest.mark.parametrize(
    "difference",
    [
        {"op": "broadcast"},
        {"group": "1"},
        {"members": (0, 1, 2)},
        {"seq": 4},
        {"shapes": ((3,),)},
        {"dtypes": ("float64",)},
        {"reduce_op": "MAX"},
        {"root": 1},
        {"names": (Name("b", "train.py step", "train.py:1"),)},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_calls_that_the_controller_has_to_judge_do_not_meet(difference):
    one, other = digests(collective(0), collective(1, **difference))
    assert one != other


def test_calls_of_different_times_do_not_meet():
    one, other = digests(collective(0), collective(1), calls=(1, 2))
    assert one != other


def test_uneven_splits_are_left_to_the_controller():
    even = {"op": "all_to_all", "splits": ((2, 2), (2, 2))}
    one, other = digests(collective(0, **even), collective(1, **even))
    assert one == other is not None
    uneven = Meetings(1).of(collective(0, op="all_to_all", splits=((1, 3), (1, 3))))
    assert not uneven.digest
    assert uneven.place == Meetings(1).of(collective(1, **even)).place, "an even one waits for it"


def message(op: str, rank: int, peer: int, tag: int = 0, numel: int = 2, **others) -> Signature:
    return collective(rank, op=op, peer=peer, tag=tag, seq=-1, shapes=((numel,),), reduce_op="", **others)


def test_messages_meet_by_their_number_until_anybody_may_send():
    sender, receiver = Meetings(1), Meetings(1)
    for _ in range(2):
        assert sender.of(message("send", 0, 1)).digest == receiver.of(message("recv", 1, 0)).digest
    ahead = sender.of(message("send", 0, 1))
    assert sender.of(message("send", 0, 1)).digest != receiver.of(message("recv", 1, 0)).digest
    assert ahead.others == (1,)
    assert sender.of(message("send", 0, 1, tag=7)).digest != receiver.of(message("recv", 1, 0, tag=8)).digest
    assert receiver.of(message("recv", 1, -1)) is None
    assert receiver.of(message("recv", 1, 0)) is None, "which message this one gets is the controller's to say"


# -- exact verdicts although the controller hears late ----------------------------------------------


def test_a_rank_that_went_on_by_the_board_and_ended_does_not_count_as_waiting():
    arbiter = Arbiter(2)
    arbiter.posted(0, 1, collective(0))
    arbiter.asks(0, 1)
    arbiter.waits(0, 1)
    arbiter.ended(0)  # the board showed rank 1's operation, and rank 1 is still running
    assert arbiter.waits_in(0) == ""
    arbiter.posted(1, 1, collective(1))
    arbiter.ended(1)


def stops_after_many() -> None:
    total = torch.ones(1)
    for _ in range(MANY):
        dist.all_reduce(total)
        total.fill_(1.0)
    if dist.get_rank() == 0:
        dist.all_reduce(total)


def test_a_deadlock_after_more_operations_than_the_log_holds(processes):
    with pytest.raises(Deadlock) as caught:
        processes.run(stops_after_many, world_size=2)
    assert f"collective {MANY}, at suites/meta/processes/{LINE}" in str(caught.value)
    assert "rank 1 has returned and will not take part" in str(caught.value)
    assert f"collective {MANY - 1}, at suites/meta/processes/" in caught.value.ranks[1]


def test_a_log_that_is_read_when_it_is_half_full_has_room_for_all(board):
    said = []

    def send(report):
        assert isinstance(report, LogHalfFull), "the log has no room"
        said.append(report)
        board.take(0, 5)

    coordinator = OperationCoordinator(0, 2, send, board)
    coordinator.begin(5)
    for number in range(2 * MANY):
        coordinator.meet(collective(0, seq=number, members=(0,)))
    assert len(said) > 2


def to_and_fro(times: int) -> float:
    rank, ball = dist.get_rank(), torch.zeros(1)
    for _ in range(times):
        if rank == 0:
            dist.send(ball + 1, 1)
            dist.recv(ball, 1)
        else:
            dist.recv(ball, 0)
            dist.send(ball + 1, 0)
    return ball.item()


def test_more_messages_than_the_log_holds(processes):
    assert processes.run(to_and_fro, MANY, world_size=2) == [2.0 * MANY, 2.0 * MANY - 1]


def test_messages_that_the_log_has_no_room_for_come_after_those_in_it(board):
    """The controller receives those messages in another way, and earlier."""
    sent = {0: [], 1: []}
    members = [SimpleNamespace(rank=rank, send=sent[rank].append, died=None) for rank in range(2)]
    for rank, op in ((0, "send"), (1, "recv")):
        board.clear(rank, 1)
        for number in range(2 + rank):
            assert board.log(rank, (number, message(op, rank, 1 - rank, numel=10 + number))) is not None
    after = Aftermath(default_group=True, groups_made=1, groups=1)
    events = [
        [(members[0], Posted(1, 2, message("send", 0, 1, numel=12)))],
        [(members[1], Asks(1, number, waits=True)) for number in range(3)],
        [(member, Done(1, pickle.dumps(None), after)) for member in members],
    ]
    found = Collector(members, 1, lambda _: events.pop(0), Arbiter(2), board, timeout_s=60).outcomes()
    assert all(isinstance(outcome, Returned) for outcome in found), "messages of another size were taken for one"
    assert sent[0] == sent[1]
    assert {grant.operation for grant in sent[0]} == {0, 1, 2}


def test_an_operation_that_a_failing_rank_has_withdrawn_is_granted_to_nobody(board):
    """The controller reads it only as the rank ends; with a grant the others would wait for the rank for ever."""
    sent = {0: [], 1: []}
    members = [
        SimpleNamespace(
            rank=rank, died=None, send=sent[rank].append, own_time=lambda: OwnTime(lambda: 0.0), is_stopped=bool
        )
        for rank in range(2)
    ]
    for rank in range(2):
        board.clear(rank, 1)
        board.log(rank, (0, collective(rank)))
    left = {"default_group": True, "groups_made": 1, "groups": 1}
    failed = Failed(1, None, "LookupError", "nothing", "", "", False, Aftermath(**left, withdrawn=(0,)))
    stopped = Halted(1, "in all_reduce", Aftermath(**left, withdrawn=(0,)))
    events = [[(members[0], failed)], [(members[1], stopped)]]
    arbiter = Arbiter(2)
    arbiter.posted(1, 0, collective(1))
    arbiter.asks(1, 0)
    board.take(1, 1)
    collector = Collector(members, 1, lambda _: events.pop(0), arbiter, board, timeout_s=60)
    collector.outcomes()
    assert not any(isinstance(message, Grant) for message in [*sent[0], *sent[1]])
    assert collector.can_go_on()


def test_the_controller_keeps_what_may_still_be_asked_about_and_nothing_else():
    arbiter = Arbiter(2)
    for number in range(100):
        for rank in range(2):
            arbiter.posted(rank, number, collective(rank, seq=number))
    arbiter.forget(0, 90)
    assert arbiter.asks(1, 5) == [(0, Grant(5)), (1, Grant(5))], "rank 1 may have been left with it"
    arbiter.forget(1, 100)
    assert len(arbiter._stages) == len(arbiter._matched) == 10
    assert arbiter.asks(0, 95) == [(0, Grant(95)), (1, Grant(95))]
    assert arbiter.asks(0, 89) == []


def test_a_rank_says_which_operations_it_may_still_ask_about(board):
    said = []

    def send(report):
        said.append(report)
        board.take(0, 1)

    coordinator = OperationCoordinator(0, 2, send, board)
    coordinator.begin(1)
    left = coordinator.post(Operation(collective(0), (), METHODS["allreduce"], ()), None)
    while not said:
        coordinator.meet(collective(0, group="alone", members=(0,)))
    assert said == [LogHalfFull(1, left.number)]


def test_a_sender_asks_at_once_where_anybody_may_be_received_from(board):
    said = []
    sender, receiver = (
        OperationCoordinator(0, 2, said.append, board),
        OperationCoordinator(1, 2, lambda report: None, board),
    )
    for coordinator in (sender, receiver):
        coordinator.begin(1)
    first = sender.post(Operation(message("send", 0, 1), (), METHODS["send"], ()), None)
    assert said == []
    receiver.post(Operation(message("recv", 1, -1), (), METHODS["recv_anysource"], ([], 0)), None)
    second = sender.post(Operation(message("send", 0, 1), (), METHODS["send"], ()), None)
    assert said == [Asks(1, first.number, waits=False), Asks(1, second.number, waits=False)]
    receiver.begin(2)
    sender.begin(2)
    sender.post(Operation(message("send", 0, 1), (), METHODS["send"], ()), None)
    assert len(said) == 2, "that was an earlier call"


def test_an_operation_that_is_refused_while_it_is_posted_stays_off_the_board(board):
    """Another rank that saw it there would launch it, and wait for this rank for ever."""

    def send(report):
        assert isinstance(report, StopMatching)
        coordinator.handle(Refuse(1, PeerFailed("another rank failed")))  # as the control thread may do at this moment

    coordinator = OperationCoordinator(0, 2, send, board)
    coordinator.begin(1)
    coordinator._thread = -1  # so that it sends a message between logging and posting
    work = coordinator.post(Operation(collective(0), (), "all_reduce", ()), None)
    assert work.is_decided
    assert board.states([0], work.meeting.digest) == [ABSENT]


class Launches:
    """A stand-in for a group that records its calls."""

    def __init__(self):
        self.received = []

    def recv(self, buffers, source, tag):
        self.received.append((*buffers, source))


@pytest.mark.parametrize(
    ("peers", "granted", "launched"),
    [
        ((0, -1, 0), ((1, 0), (2, 0), (0, 0)), [[], [], ["a0", "b0", "c0"]]),
        ((-1, 0), ((1, 0), (0, 0)), [[], ["a0", "b0"]]),
        ((-1, 0), ((1, 0), (0, 1)), [[], ["a1", "b0"]]),
        ((0, 0), ((1, 0), (0, 0)), [[], ["a0", "b0"]]),
        ((0, 1), ((1, 1), (0, 0)), [["b1"], ["b1", "a0"]]),
        ((0, -1), ((1, 1), (0, 0)), [["b1"], ["b1", "a0"]]),
    ],
    ids=["any between", "any first", "any first, of another", "one way", "another source", "any of another"],
)
def test_receives_of_one_source_are_launched_as_posted_in_whatever_order_they_are_granted(peers, granted, launched):
    group, coordinator = Launches(), OperationCoordinator(2, 3, lambda report: None, None)
    coordinator.begin(1)
    posted = []
    for name, peer in zip("abc", peers, strict=False):
        signature = message("recv", 2, peer, members=(0, 1, 2))
        method, args = ("recv_anysource", ([name], 0)) if peer < 0 else ("recv", ([name], peer, 0))
        posted.append(coordinator.post(Operation(signature, (), METHODS[method], args), group))
    for (which, source), expected in zip(granted, launched, strict=True):
        coordinator.handle(Grant(posted[which].number, source))
        assert [f"{name}{source}" for name, source in group.received] == expected


def differs_after_many() -> None:
    for _ in range(MANY // 4):
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1 + dist.get_rank()))


def test_a_mismatch_after_many_operations_that_nobody_asked_for(processes):
    with pytest.raises(CollectiveMismatch, match="differ in the shape"):
        processes.run(differs_after_many, world_size=2)


def differ_and_never_wait() -> None:
    dist.all_reduce(torch.ones(1 + dist.get_rank()), async_op=True)


def test_a_mismatch_of_operations_that_no_rank_waits_for(processes):
    with pytest.raises(CollectiveMismatch, match="differ in the shape"):
        processes.run(differ_and_never_wait, world_size=2)


def pending_and_urgent(rank: int) -> list[float]:
    """Post a pending operation, which must not be overtaken by one that all ranks wait for."""
    found = []
    for step in range(30):
        late, urgent = torch.tensor([1.0 + step]), torch.tensor([100.0 + step])
        if (step + rank) % 2:
            time.sleep(0.0005)
        work = dist.all_reduce(late, async_op=True)
        dist.all_reduce(urgent)
        work.wait()
        found += [late.item(), urgent.item()]
    return found


def test_operations_of_a_group_start_in_one_order(processes):
    def on_rank() -> list[float]:
        return pending_and_urgent(dist.get_rank())

    expected = [2 * value for step in range(30) for value in (1.0 + step, 100.0 + step)]
    assert processes.run(on_rank, world_size=2) == [expected, expected]


def mixed_messages() -> list[float]:
    rank = dist.get_rank()
    if rank == 0:
        for value in range(1, 5):
            dist.send(torch.tensor([float(value)]), 1)
        return []
    taken = [torch.empty(1) for _ in range(4)]
    dist.recv(taken[0], 0)
    pending = dist.irecv(taken[1])  # from any rank: takes the second message, whatever is received meanwhile
    dist.recv(taken[2], 0)
    dist.recv(taken[3], 0)
    assert pending is not None
    pending.wait()
    return [tensor.item() for tensor in taken]


def test_a_receive_from_anybody_takes_its_turn(processes):
    assert processes.run(mixed_messages, world_size=2)[1] == [1.0, 2.0, 3.0, 4.0]


def meets_now_and_then(steps: int) -> float:
    rank, total = dist.get_rank(), torch.zeros(1)
    chance = random.Random(rank)
    for step in range(steps):
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0.0, 0.002))
        one = torch.ones(1)
        if step % 3 < 2:
            dist.all_reduce(one)
            total += one
        elif rank == 0:
            dist.recv(one, 1)
        elif rank == 1:
            dist.send(one, 0)
    return total.item()


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_verdict_on_correct_ranks_that_the_system_stops_at_any_moment(processes, world_size):
    """Each stop delays one rank's view of the board, or the controller's, to an unusual moment."""
    pids = processes.pids(world_size)
    chance, over = random.Random(world_size), threading.Event()

    def disturb() -> None:
        while not over.is_set():
            pid = chance.choice(pids)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(chance.uniform(0.0005, 0.003))
                os.kill(pid, signal.SIGCONT)
            time.sleep(chance.uniform(0.0003, 0.002))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        with processes.open(world_size) as ranks:
            for _ in range(60):
                assert ranks.run(meets_now_and_then, 6) == [4.0 * world_size] * world_size
    finally:
        over.set()
        thread.join()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert processes.pids(world_size) == pids


def test_ranks_that_hash_strings_in_other_ways_have_the_same_digests():
    code = """
from pdlcheck.worlds.processes.exchange.board import digest_of
print(digest_of(3, ("0", 1, "all_reduce", (0, 1), None, "SUM", ("float32",), ((3,),))))
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1, "their operations would all take the way through the controller"
