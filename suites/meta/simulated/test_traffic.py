"""The messages of a run, byte by byte; primitives send what their docstrings state."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pdlcheck.clock import Link, Topology
from pdlcheck.clock.rounds import rounds
from pdlcheck.errors import CollectiveMismatch, Deadlock, Unsupported
from pdlcheck.primitives import (
    ring_all_gather,
    ring_all_reduce,
    ring_pass,
    ring_reduce_scatter,
    star_broadcast,
    tree_broadcast,
)
from pdlcheck.worlds import get_world
from pdlcheck.worlds.semantics import make_semantics

sizes = st.integers(1, 6)


def traffic_of(program, *args, world_size, **options):
    world = get_world("sim", **options)
    world.run(program, *args, world_size=world_size)
    return world.traffic


def table(traffic, op=None):
    """Return ``{(src, dst): (messages, bytes)}``."""
    flows = {}
    for (src, dst, name), (messages, nbytes) in traffic.flows.items():
        if op in (None, name):
            known = flows.get((src, dst), (0, 0))
            flows[src, dst] = (known[0] + messages, known[1] + nbytes)
    return flows


# -- the primitives send what their docstrings say -------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_ring_all_reduce_moves_exactly_2_times_n_minus_1_over_n_of_the_tensor_per_rank(n):
    traffic = traffic_of(lambda: ring_all_reduce(torch.ones(5 * n, dtype=torch.float64)), world_size=n)
    tensor_bytes = 5 * n * 8
    for rank in range(n):
        assert traffic.sent_bytes(rank) * n == 2 * (n - 1) * tensor_bytes
        assert traffic.received_bytes(rank) * n == 2 * (n - 1) * tensor_bytes
        assert traffic.messages(rank, peer=(rank + 1) % n) == traffic.messages(rank) == 2 * (n - 1)


def chunks(numel, n):
    return [len(chunk) for chunk in torch.empty(numel).tensor_split(n)]


@given(numel=st.integers(0, 20), n=sizes)
def test_ring_all_reduce_sends_each_rank_all_chunks_but_its_own_and_then_all_but_the_next(numel, n):
    traffic = traffic_of(lambda: ring_all_reduce(torch.ones(numel)), world_size=n)
    own = chunks(numel, n)
    expected = {
        (rank, (rank + 1) % n): (2 * (n - 1), 4 * (2 * numel - own[rank] - own[(rank + 1) % n])) for rank in range(n)
    }
    assert table(traffic) == (expected if n > 1 else {})


@given(rows=st.integers(0, 9), columns=st.integers(1, 3), n=sizes)
def test_ring_reduce_scatter_sends_world_size_minus_1_messages_of_one_part_each(rows, columns, n):
    traffic = traffic_of(lambda: ring_reduce_scatter(torch.ones(rows, columns)), world_size=n)
    own = chunks(rows, n)
    expected = {(rank, (rank + 1) % n): (n - 1, 4 * columns * (rows - own[rank])) for rank in range(n)}
    assert table(traffic) == (expected if n > 1 else {})


@given(numel=st.integers(0, 9), n=sizes)
def test_ring_all_gather_sends_world_size_minus_1_messages_of_the_tensors_size(numel, n):
    traffic = traffic_of(lambda: ring_all_gather(torch.ones(numel)), world_size=n)
    expected = {(rank, (rank + 1) % n): (n - 1, 4 * numel * (n - 1)) for rank in range(n)}
    assert table(traffic) == (expected if n > 1 else {})


@given(numel=st.integers(0, 9), n=sizes)
def test_ring_pass_sends_world_size_messages(numel, n):
    traffic = traffic_of(lambda: ring_pass(torch.ones(numel)), world_size=n)
    assert table(traffic) == ({(rank, (rank + 1) % n): (1, 4 * numel) for rank in range(n)} if n > 1 else {})


@given(numel=st.integers(0, 9), n=sizes, data=st.data())
def test_star_broadcast_sends_one_message_to_each_other_rank_all_from_src(numel, n, data):
    src = data.draw(st.integers(0, n - 1))
    traffic = traffic_of(lambda: star_broadcast(torch.ones(numel), src), world_size=n)
    assert table(traffic) == {(src, rank): (1, 4 * numel) for rank in range(n) if rank != src}


@given(numel=st.integers(0, 9), n=st.integers(1, 11), data=st.data())
def test_tree_broadcast_sends_each_other_rank_one_message_in_log_2_rounds(numel, n, data):
    src = data.draw(st.integers(0, n - 1))
    traffic = traffic_of(lambda: tree_broadcast(torch.ones(numel), src), world_size=n)
    flows = table(traffic)
    assert set(flows.values()) <= {(1, 4 * numel)}
    assert sorted(dst for _, dst in flows) == [rank for rank in range(n) if rank != src]
    assert flows == table(traffic_of(lambda: dist.broadcast(torch.ones(numel), src), world_size=n))


@given(n=st.integers(1, 33))
def test_tree_broadcast_takes_ceil_log_2_rounds(n):
    world = get_world("sim", topology=Topology(intra=Link(latency_s=1.0)))
    world.run(lambda: tree_broadcast(torch.ones(1)), world_size=n)
    assert world.timeline.step_time_s == math.ceil(math.log2(n))


# -- messages and collectives ----------------------------------------------------------------------


@given(numel=st.integers(0, 20), n=st.integers(2, 6))
def test_a_collective_counts_as_the_messages_of_the_ring_that_is_its_model(numel, n):
    for primitive, collective, op in [
        (lambda: ring_all_reduce(torch.ones(numel)), lambda: dist.all_reduce(torch.ones(numel)), "all_reduce"),
        (
            lambda: ring_all_gather(torch.ones(numel)),
            lambda: dist.all_gather([torch.ones(numel) for _ in range(n)], torch.ones(numel)),
            "all_gather",
        ),
        (
            lambda: ring_reduce_scatter(torch.ones(n * numel)),
            lambda: dist.reduce_scatter(torch.ones(numel), [torch.ones(numel) for _ in range(n)]),
            "reduce_scatter",
        ),
    ]:
        expected = table(traffic_of(primitive, world_size=n), "send")
        traffic = traffic_of(collective, world_size=n)
        assert table(traffic, op) == expected
        assert table(traffic, "send") == {}
        assert traffic.by_operation[op].calls == 1


@given(pieces=st.lists(st.integers(0, 9), min_size=2, max_size=6))
def test_of_uneven_pieces_a_rank_passes_on_all_but_its_own(pieces):
    n, sent = len(pieces), Counter()
    for messages in rounds("reduce_scatter", n, 0, tuple(pieces)):
        sent.update({src: nbytes for src, _, nbytes in messages})
    assert [sent[rank] for rank in range(n)] == [sum(pieces) - own for own in pieces]


def rooted(op, root):
    x, many = torch.ones(3), [torch.ones(3) for _ in range(dist.get_world_size())]
    is_root = dist.get_rank() == root
    if op == "gather":
        dist.gather(x, many if is_root else None, root)
    elif op == "scatter":
        dist.scatter(x, many if is_root else None, root)
    else:
        dist.reduce(x, root)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("gather", {(0, 1): (1, 12), (2, 1): (1, 12), (3, 1): (1, 12)}),
        ("scatter", {(1, 0): (1, 12), (1, 2): (1, 12), (1, 3): (1, 12)}),
        ("reduce", {(2, 1): (1, 12), (3, 1): (1, 12), (0, 2): (1, 12)}),
    ],
)
def test_rooted_collectives_are_counted_to_and_from_their_root(op, expected):
    traffic = traffic_of(rooted, op, 1, world_size=4)
    assert table(traffic) == expected
    assert traffic.by_operation == {op: (1, 3, 36)}


def test_all_to_all_counts_the_pieces_that_are_not_a_ranks_own():
    def uneven():
        rank, n = dist.get_rank(), dist.get_world_size()
        given = [torch.ones(rank + 10 * to) for to in range(n)]
        dist.all_to_all([torch.empty(src + 10 * rank) for src in range(n)], given)

    traffic = traffic_of(uneven, world_size=3)
    assert table(traffic) == {
        (src, dst): (1, 4 * (src + 10 * dst)) for src in range(3) for dst in range(3) if src != dst
    }


def test_a_barrier_moves_no_bytes():
    assert traffic_of(dist.barrier, world_size=5).by_operation == {"barrier": (1, 15, 0)}


def test_a_group_counts_by_global_rank_and_making_it_is_free():
    def in_a_group():
        group = dist.new_group([3, 1])
        if dist.get_rank() in (1, 3):
            dist.all_reduce(torch.ones(4), group=group)

    traffic = traffic_of(in_a_group, world_size=4)
    assert table(traffic) == {(1, 3): (2, 16), (3, 1): (2, 16)}
    assert traffic.by_operation == {"all_reduce": (1, 4, 32)}


def test_messages_and_collectives_are_told_apart():
    def both():
        rank = dist.get_rank()
        dist.send(torch.ones(10), 1) if rank == 0 else dist.recv(torch.ones(10), 0)
        dist.all_reduce(torch.ones(2))

    traffic = traffic_of(both, world_size=2)
    assert traffic.sent_bytes(0, peer=1, op="send") == 40
    assert traffic.sent_bytes(0, peer=1, op="all_reduce") == 8
    assert (traffic.sent_bytes(0), traffic.sent_bytes(1), traffic.sent_bytes()) == (48, 8, 56)
    assert (traffic.received_bytes(0), traffic.received_bytes(1, peer=0, op="send")) == (8, 40)
    assert traffic.by_operation == {"all_reduce": (1, 4, 16), "send": (1, 1, 40)}
    assert str(traffic).splitlines() == [
        "operation            calls  messages         bytes",
        "all_reduce (ring)        1         4            16",
        "send                     1         1            40",
        "rank                        messages    bytes sent  received",
        "0                                  3            48         8",
        "1                                  2             8        48",
    ]


# -- of which run ----------------------------------------------------------------------------------


def one_message(numel):
    x = torch.ones(numel)
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)


def test_each_run_starts_from_nothing():
    world = get_world("sim")
    world.run(one_message, 1, world_size=2)
    first = world.traffic
    world.run(one_message, 2, world_size=2)
    assert (first.sent_bytes(), world.traffic.sent_bytes()) == (4, 8)
    with world.open(2) as ranks:
        ranks.run(one_message, 3)
        assert world.traffic.sent_bytes() == 12
        ranks.run(one_message, 4)
        assert world.traffic.sent_bytes() == 16
    assert world.traffic.sent_bytes() == 16


def test_a_run_that_fails_counts_what_was_sent_before():
    world = get_world("sim")

    def then_deadlock():
        one_message(5)
        dist.recv(torch.ones(1), 1 - dist.get_rank())

    with pytest.raises(Deadlock):
        world.run(then_deadlock, world_size=2)
    assert table(world.traffic) == {(0, 1): (1, 20)}
    with pytest.raises(CollectiveMismatch):
        world.run(lambda: dist.all_reduce(torch.ones(dist.get_rank() + 1)), world_size=2)
    assert table(world.traffic) == {}


@pytest.mark.parametrize("semantics", ["buffered", "gloo", "nccl"])
def test_the_count_does_not_depend_on_the_semantics(semantics):
    assert table(traffic_of(one_message, 7, world_size=2, semantics=semantics)) == {(0, 1): (1, 28)}


@pytest.mark.parametrize("semantics", ["rendezvous", "buffered"])
def test_a_message_that_nobody_receives_is_not_counted(semantics):
    def lost():
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1), 1)

    world = get_world("sim", semantics=make_semantics(semantics, leaks=False))
    world.run(lost, world_size=2)
    assert world.traffic.messages() == 0


def test_there_is_no_traffic_before_the_first_run():
    with pytest.raises(RuntimeError, match=r"world\.traffic is about the last run, and there was none"):
        _ = get_world("sim").traffic


def test_a_name_that_does_not_exist_is_no_zero():
    traffic = traffic_of(one_message, 1, world_size=2)
    with pytest.raises(ValueError, match="a rank must be one of 0 to 1, got 2"):
        traffic.sent_bytes(0, peer=2)
    with pytest.raises(ValueError, match=r"op must be send or one of all_gather, .*; got 'allreduce'"):
        traffic.messages(op="allreduce")


def test_real_processes_do_not_count():
    world = get_world("gloo")
    with pytest.raises(Unsupported, match=r"gloo does not count what its ranks send; use get_world\(\"sim\"\)"):
        _ = world.traffic
    with pytest.raises(Unsupported, match=r"gloo has no virtual clock; use get_world\(\"sim\", topology=Topology"):
        _ = world.timeline
