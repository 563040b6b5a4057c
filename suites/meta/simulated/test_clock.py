"""The virtual clock gives the times of textbooks under any schedule."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlcheck.clock import Link, Topology, compute
from pdlcheck.clock.rounds import ALGORITHMS, rounds, seconds
from pdlcheck.errors import Deadlock, Inconclusive, Unsupported
from pdlcheck.faults import Kill, Slow
from pdlcheck.primitives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast
from pdlcheck.worlds import get_world

from .timed_programs import exchange, gpipe, one_f_one_b, train_ddp_of_layers

FREE = Topology(intra=Link())
LINK = Link(latency_s=2e-6, bandwidth_GBps=10)  # 1e10 bytes a second
ONE_LINK = Topology(intra=LINK)


def timed(program, *args, world_size, topology=FREE, **options):
    """Return the timeline of a run."""
    world = get_world("sim", topology=topology, **options)
    world.run(program, *args, world_size=world_size)
    return world.timeline


def about(value):
    """Compare up to the rounding of a sum of floats."""
    return pytest.approx(value, rel=1e-12)


# -- pipelines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8), (8, 4)])
def test_the_bubble_of_a_pipeline_is_that_of_gpipe(schedule, p, m):
    timeline = timed(schedule, m, 1.0, world_size=p)
    assert timeline.bubble == about((p - 1) / (m + p - 1)) if p > 1 else timeline.bubble == 0
    assert timeline.step_time_s == 3.0 * (m + p - 1)
    assert all(timeline.compute_s(rank) == 3.0 * m for rank in range(p))


def test_the_bubble_of_256_stages():
    assert timed(gpipe, 2, 1.0, world_size=256, schedule="first").bubble == about(255 / 257)


# -- collectives and rings -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 64, 256])
def test_an_all_reduce_takes_what_patarasuk_and_yuan_say(n):
    timeline = timed(lambda: dist.all_reduce(torch.ones(n * 16)), world_size=n, topology=ONE_LINK, schedule="first")
    assert timeline.step_time_s == about(2 * (n - 1) * (2e-6 + 16 * 4 / 1e10))


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_a_ring_made_of_messages_takes_as_long_as_the_collective(n):
    for ring, collective in [
        (lambda: ring_all_reduce(torch.ones(n * 16)), lambda: dist.all_reduce(torch.ones(n * 16))),
        (
            lambda: ring_reduce_scatter(torch.ones(n * 16)),
            lambda: (
                dist.reduce_scatter_single(torch.ones(16), torch.ones(n * 16))
                if hasattr(dist, "reduce_scatter_single")
                else dist.reduce_scatter_tensor(torch.ones(16), torch.ones(n * 16))
            ),
        ),
        (
            lambda: ring_all_gather(torch.ones(16)),
            lambda: dist.all_gather([torch.ones(16) for _ in range(n)], torch.ones(16)),
        ),
    ]:
        one, other = (timed(program, world_size=n, topology=ONE_LINK) for program in (ring, collective))
        assert one.step_time_s == about(other.step_time_s)
    assert timed(lambda: ring_all_reduce(torch.ones(n * 16)), world_size=n, topology=ONE_LINK).step_time_s == about(
        2 * (n - 1) * (2e-6 + 16 * 4 / 1e10)
    )


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_a_tree_made_of_messages_takes_as_long_as_a_broadcast(n):
    timeline = timed(lambda: tree_broadcast(torch.ones(100)), world_size=n, topology=ONE_LINK)
    assert timeline.step_time_s == about(math.log2(n) * (2e-6 + 400 / 1e10))
    broadcast = timed(lambda: dist.broadcast(torch.ones(100), 0), world_size=n, topology=ONE_LINK)
    assert broadcast.step_time_s == about(timeline.step_time_s)


N, B = 8, 800
FORMULAS = {  # a = 2e-6 s, b = 1e10 bytes/s
    "all_gather": ((B,), 7 * (2e-6 + B / 1e10)),
    "all_reduce": ((B, 4), 14 * (2e-6 + B / 8 / 1e10)),
    "all_to_all": ((B // 8,) * 64, 7 * (2e-6 + B / 8 / 1e10)),
    "barrier": ((), 3 * 2e-6),
    "broadcast": ((B,), 3 * (2e-6 + B / 1e10)),
    "gather": ((B,), 7 * (2e-6 + B / 1e10)),
    "monitored_barrier": ((), 14 * 2e-6),
    "reduce": ((B,), 3 * (2e-6 + B / 1e10)),
    "reduce_scatter": ((B // 8,) * 8, 7 * (2e-6 + B / 8 / 1e10)),
    "scatter": ((B,) * 8, 7 * (2e-6 + B / 1e10)),
}


def test_every_algorithm_has_a_formula_here():
    assert FORMULAS.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("op", FORMULAS)
@pytest.mark.parametrize("root", [0, 5])
def test_a_collective_takes_what_its_formula_says(op, root):
    payload, expected = FORMULAS[op]
    assert seconds(op, range(N), root, payload, ONE_LINK) == about(expected)


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
@given(n=st.integers(1, 40), data=st.data())
def test_every_rank_of_a_tree_is_reached_once(op, n, data):
    root = data.draw(st.integers(0, n - 1))
    messages = [message for each in rounds(op, n, root, (8,)) for message in each]
    far = [dst for _, dst, _ in messages] if op == "broadcast" else [src for src, _, _ in messages]
    assert sorted([*far, root]) == list(range(n))
    assert len(list(rounds(op, n, root, (8,)))) == math.ceil(math.log2(n))


def test_ranks_fill_the_devices_of_one_host_and_then_those_of_the_next():
    far = Link(latency_s=1.0)
    topology = Topology(devices=2, intra=LINK, inter=far, links={(0, 5): Link()})
    hosts = [{dst for dst in range(6) if topology.link(src, dst) == LINK} for src in range(6)]
    assert hosts == [{0, 1}, {0, 1}, {2, 3}, {2, 3}, {4, 5}, {4, 5}]
    assert (topology.link(0, 5), topology.link(5, 0)) == (Link(), far)


def test_the_slowest_link_of_a_ring_sets_its_pace():
    slow = Link(latency_s=1e-3)
    for topology in (
        Topology(devices=2, intra=LINK, inter=slow),
        Topology(intra=LINK, links={(2, 3): slow}),
    ):
        timeline = timed(lambda: dist.all_reduce(torch.ones(4)), world_size=4, topology=topology)
        assert timeline.step_time_s == about(6 * 1e-3)
    backwards = Topology(intra=LINK, links={(3, 2): slow})  # the ring runs in the other direction
    timeline = timed(lambda: dist.all_reduce(torch.ones(4)), world_size=4, topology=backwards)
    assert timeline.step_time_s == about(6 * (2e-6 + 4 / 1e10))


# -- messages --------------------------------------------------------------------------------------


def small_message(send_after, recv_after):
    x = torch.zeros(25)
    compute(send_after if dist.get_rank() == 0 else recv_after)
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)


SECOND_A_BYTE = Topology(intra=Link(latency_s=5.0, bandwidth_GBps=1e-9))  # 100 bytes take 105 s


@pytest.mark.parametrize(("send_after", "recv_after"), [(1.0, 3.0), (3.0, 1.0)])
def test_a_message_begins_when_both_are_there(send_after, recv_after):
    timeline = timed(small_message, send_after, recv_after, world_size=2, topology=SECOND_A_BYTE)
    (message,) = timeline.messages
    assert (message.src, message.dst, message.start_s, message.end_s, message.nbytes) == (0, 1, 3.0, 108.0, 100)
    waits = [(span.rank, span.op, span.start_s, span.end_s) for span in timeline.spans if span.kind == "wait"]
    assert waits == [(0, "send", send_after, 108.0), (1, "recv", recv_after, 108.0)]


def test_a_buffered_send_ends_at_once_and_travels_alone():
    timeline = timed(small_message, 1.0, 3.0, world_size=2, topology=SECOND_A_BYTE, semantics="buffered")
    assert [(m.start_s, m.end_s) for m in timeline.messages] == [(1.0, 106.0)]
    assert [(s.rank, s.start_s, s.end_s) for s in timeline.spans if s.kind == "wait"] == [(1, 3.0, 106.0)]
    late = timed(small_message, 1.0, 300.0, world_size=2, topology=SECOND_A_BYTE, semantics="buffered")
    assert late.step_time_s == 300.0  # it had already arrived
    assert [(m.start_s, m.end_s) for m in late.messages] == [(1.0, 106.0)]


def to_rank_0_at_once():
    """Send 100 bytes from ranks 3, 2 and 1 each, one second after the other."""
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.irecv(torch.zeros(25), src) for src in (1, 2, 3)]
        for work in works:
            work.wait()
    else:
        compute(3.0 - rank)
        dist.send(torch.zeros(25), 0)


@pytest.mark.parametrize("schedule", ["first", "random:1", "random:2"])
def test_a_rank_receives_one_message_at_a_time_the_first_that_is_ready_first(schedule):
    timeline = timed(to_rank_0_at_once, world_size=4, topology=SECOND_A_BYTE, schedule=schedule)
    assert [(m.src, m.start_s, m.end_s) for m in timeline.messages] == [(3, 0, 105), (2, 105, 210), (1, 210, 315)]


def to_rank_3_in_any_order():
    """Send 100 bytes from ranks 0, 1 and 2 at one time; the receives are posted in the other order."""
    if dist.get_rank() == 3:
        for work in [dist.irecv(torch.zeros(25), src) for src in (2, 1, 0)]:
            work.wait()
    else:
        dist.send(torch.zeros(25), 3)


@pytest.mark.parametrize("schedule", ["first", "random:1", "random:2"])
def test_of_messages_that_are_ready_at_one_time_that_of_the_lower_rank_goes_first(schedule):
    timeline = timed(to_rank_3_in_any_order, world_size=4, topology=SECOND_A_BYTE, schedule=schedule)
    assert [message.src for message in timeline.messages] == [0, 1, 2]


@pytest.mark.parametrize("sender", [0, 2])
def test_a_message_waits_for_the_collective_that_either_of_its_ranks_is_in(sender):
    def both():
        rank = dist.get_rank()
        group = dist.new_group([0, 1])
        work = dist.all_reduce(torch.zeros(26), group=group, async_op=True) if rank < 2 else None
        if rank == 2:
            compute(1.0)
        if rank in (0, 2):
            dist.send(torch.zeros(25), 2 - rank) if rank == sender else dist.recv(torch.zeros(25), 2 - rank)
        if work is not None:
            work.wait()

    (message,) = timed(both, world_size=3, topology=SECOND_A_BYTE).messages
    assert (message.src, message.start_s, message.end_s) == (sender, 114.0, 219.0)


def test_a_rank_sends_and_receives_at_the_same_time():
    def both_ways():
        peer = 1 - dist.get_rank()
        works = [dist.isend(torch.zeros(25), peer), dist.irecv(torch.zeros(25), peer)]
        for work in works:
            work.wait()

    assert timed(both_ways, world_size=2, topology=SECOND_A_BYTE).step_time_s == 105.0


# -- overlap ---------------------------------------------------------------------------------------


def reduce_beside(seconds, waits_first):
    x = torch.zeros(25)  # a ring of two: 2 rounds of 5 s + 48 or 52 bytes
    work = dist.all_reduce(x, async_op=True)
    if waits_first:
        work.wait()
    compute(seconds)
    work.wait()


@pytest.mark.parametrize(
    ("seconds", "waits_first", "step", "overlap"),
    [(200.0, False, 200.0, 1.0), (200.0, True, 314.0, 0.0), (57.0, False, 114.0, 0.5), (0.0, False, 114.0, 0.0)],
)
def test_communication_hides_under_the_computation_that_goes_on_beside_it(seconds, waits_first, step, overlap):
    timeline = timed(reduce_beside, seconds, waits_first, world_size=2, topology=SECOND_A_BYTE)
    assert (timeline.step_time_s, timeline.overlap, timeline.bubble) == (step, overlap, 0.0)
    for rank in range(2):
        assert timeline.communication_s(rank) == 114.0
        assert timeline.exposed_s(rank) == 114.0 * (1 - overlap)


def test_a_wait_for_what_has_ended_takes_no_time():
    def late():
        work = dist.all_reduce(torch.zeros(26), async_op=True)
        compute(200.0)
        work.wait()
        compute(1.0)

    timeline = timed(late, world_size=2, topology=SECOND_A_BYTE)
    assert timeline.step_time_s == 201.0
    assert timeline.spans_of(0, "wait") == []


def test_collectives_of_a_rank_go_one_after_the_other():
    def twice():
        works = [dist.all_reduce(torch.zeros(26), async_op=True) for _ in range(2)]
        for work in reversed(works):
            work.wait()

    timeline = timed(twice, world_size=2, topology=SECOND_A_BYTE)
    assert [(s.start_s, s.end_s) for s in timeline.spans_of(0, "communication")] == [(0, 114), (114, 228)]


BUCKET = 512 * 512 * 4


def ddp(layers, seconds, **options):
    """Return the timeline of a step of 8 ranks over links of 1e5 bytes a second."""
    topology = Topology(intra=Link(latency_s=0.0, bandwidth_GBps=1e-4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return timed(train_ddp_of_layers, layers, seconds, world_size=8, topology=topology, **options)


def test_ddp_hides_all_but_its_last_bucket():
    bucket_s = 14 / 8 * BUCKET / 1e5  # 18.35 s
    timeline = ddp(4, 100.0)
    gradients = [s for s in timeline.spans_of(0, "communication") if s.op == "all_reduce" and s.nbytes == BUCKET]
    assert len(gradients) == 4
    first = timeline.spans_of(0, "compute")[4].start_s  # of the second step
    assert [s.start_s - first for s in gradients] == about([100.0, 200.0, 300.0, 400.0])
    assert all(s.end_s - s.start_s == about(bucket_s) for s in gradients)
    assert timeline.step_time_s - first == about(400.0 + bucket_s)


def test_ddp_with_slow_links_is_bound_by_its_buckets():
    bucket_s = 14 / 8 * BUCKET / 1e5
    timeline = ddp(4, 10.0)
    first = timeline.spans_of(0, "compute")[4].start_s
    assert timeline.step_time_s - first == about(10.0 + 4 * bucket_s)


def test_the_times_of_ddp_do_not_depend_on_the_schedule():
    runs = [ddp(2, 10.0, schedule=schedule) for schedule in ("first", "random:1", "random:2", "pct:3")]
    assert all(run == runs[0] for run in runs)
    for rank in range(8):
        last = runs[0].spans_of(rank, "wait")[-1]
        assert (last.op, last.end_s) == ("all_reduce", runs[0].step_time_s)


# -- slow ranks ------------------------------------------------------------------------------------


def three_steps():
    for _ in range(3):
        compute(1.0)
        dist.all_reduce(torch.ones(1))


def test_a_slow_rank_holds_all_up():
    timeline = timed(three_steps, world_size=4, faults=[Slow(rank=2, factor=2.5)])
    assert timeline.step_time_s == 7.5
    assert [timeline.compute_s(rank) for rank in range(4)] == [3.0, 3.0, 7.5, 3.0]
    assert [timeline.idle_s(rank) for rank in range(4)] == [4.5, 4.5, 0.0, 4.5]
    assert timeline.bubble == 3 * 4.5 / (4 * 7.5)
    assert [(s.start_s, s.end_s) for s in timeline.spans_of(0, "wait")] == [(1.0, 2.5), (3.5, 5.0), (6.0, 7.5)]


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_a_factor_must_be_positive(factor):
    with pytest.raises(ValueError, match=r"factor must be positive and finite, got .*; pass 2.0 for half the speed"):
        Slow(0, factor)


def test_a_slow_rank_must_exist_have_a_clock_and_compute():
    with pytest.raises(ValueError, match=r"Slow\(rank=4, factor=2.0\): with world_size=4 a rank is one of 0 to 3"):
        timed(three_steps, world_size=4, faults=[Slow(4, 2.0)])
    with pytest.raises(ValueError, match=r"Slow\(rank=0, factor=2.0\) acts on the virtual clock; pass topology="):
        get_world("sim", faults=[Slow(0, 2.0)]).run(three_steps, world_size=4)
    with pytest.raises(ValueError, match=r"factor=2.0\) and .*factor=3.0\) for one rank; multiply their factors"):
        timed(three_steps, world_size=4, faults=[Slow(0, 2.0), Slow(0, 3.0)])
    with pytest.raises(Inconclusive, match=r"Slow\(rank=1, factor=2.0\) did not come about: the rank does not call"):
        timed(lambda: dist.barrier(), world_size=2, faults=[Slow(1, 2.0)])


def test_a_rank_can_be_slow_while_another_is_killed():
    world = get_world("sim", topology=FREE, faults=[Slow(0, 2.0), Kill(1, 1)])
    with pytest.raises(Exception, match="rank 1 was killed"):
        world.run(three_steps, world_size=2)
    assert world.timeline.compute_s(0) == 4.0


# -- what does not depend on the schedule ----------------------------------------------------------

CALLS = st.sampled_from(["all_reduce", "shift", "to_rank_0", "wait"])


@settings(max_examples=30)
@given(data=st.data())
def test_the_times_do_not_depend_on_the_schedule(data):
    calls = data.draw(st.lists(CALLS, min_size=1, max_size=5))
    sizes = [data.draw(st.integers(1, 300)) for _ in calls]
    waits = [data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)) for _ in calls]
    world_size = data.draw(st.integers(2, 4))
    semantics = data.draw(st.sampled_from(["rendezvous", "buffered", "nccl"]))
    topology = Topology(devices=2, intra=Link(1e-6, 1), inter=Link(2e-6, 0.5))
    runs = [
        timed(exchange, waits, sizes, calls, world_size=world_size, topology=topology, schedule=s, semantics=semantics)
        for s in ("first", f"random:{data.draw(st.integers(0, 99))}", f"pct:{data.draw(st.integers(0, 99))}")
    ]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0].by_schedule == ()


def test_what_depends_on_the_schedule_says_so():
    def from_anybody():
        if dist.get_rank() == 0:
            dist.recv(torch.zeros(1))
        else:
            dist.send(torch.zeros(1), 0)

    (reason,) = timed(from_anybody, world_size=2).by_schedule
    assert reason.startswith("receive from any rank, at ")

    def asks():
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        while not work.is_completed():
            pass

    assert any("is_completed of all_reduce" in reason for reason in timed(asks, world_size=2).by_schedule)


# -- edges -----------------------------------------------------------------------------------------


def test_a_future_made_of_another_is_waited_for():
    def then():
        work = dist.all_reduce(torch.zeros(26), async_op=True)
        work.get_future().then(lambda _: None).wait()
        compute(1.0)

    timeline = timed(then, world_size=2, topology=SECOND_A_BYTE)
    assert timeline.step_time_s == 115.0


def test_a_rank_that_waits_for_ever_has_a_span_without_an_end():
    world = get_world("sim", topology=FREE)
    with pytest.raises(Deadlock):
        world.run(lambda: (compute(2.0), dist.recv(torch.zeros(1), 1 - dist.get_rank())), world_size=2)
    assert world.timeline.step_time_s == math.inf
    for rank in range(2):
        (span,) = world.timeline.spans_of(rank, "wait")
        assert (span.start_s, span.never_ends) == (2.0, True)
        assert span.what == f"recv from rank {1 - rank} of float32 (1,)"
        assert "test_clock.py" in span.where


def test_without_a_topology_there_are_steps_and_no_seconds():
    world = get_world("sim", timeline=True)
    world.run(three_steps, world_size=2)
    timeline = world.timeline
    assert timeline.in_steps
    assert timeline.end == 6.0
    for name in ("step_time_s", "overlap", "bubble"):
        with pytest.raises(ValueError, match=rf"{name} needs a model of the links: get_world"):
            getattr(timeline, name)


def test_a_world_without_times_says_how_to_get_them():
    world = get_world("sim")
    world.run(lambda: compute(1e9), world_size=2)  # takes no time
    with pytest.raises(Unsupported, match=r"this world keeps no times: get_world\(.sim., topology="):
        _ = world.timeline
    with pytest.raises(RuntimeError, match=r"there was none; call world\.run first"):
        _ = get_world("sim", timeline=True).timeline


def test_outside_of_simulated_ranks_compute_sleeps(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    compute(2.5)
    assert slept == [2.5]
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="seconds must be at least 0 and finite, got"):
            compute(wrong)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Link(-1.0), "latency_s must be at least 0"),
        (lambda: Link(0.0, 0.0), "bandwidth_GBps must be positive"),
        (lambda: Topology(intra=LINK, devices=0), "devices must be at least 1"),
        (lambda: Topology(intra=LINK, hosts=2), "hosts=2 needs devices"),
        (lambda: Topology(intra=LINK, hosts=2, devices=2).check(5), "2 hosts x 2 devices has no place for"),
        (lambda: Topology(intra=LINK, links={(0, 4): LINK}).check(4), r"links has \(0, 4\), with world_size=4 ranks"),
    ],
)
def test_links_and_topologies_say_what_is_wrong(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_the_table_of_a_timeline():
    timeline = timed(reduce_beside, 57.0, False, world_size=2, topology=SECOND_A_BYTE)
    assert str(timeline).splitlines() == [
        " rank   compute s   exposed s      idle s  communication s",
        "    0          57          57           0              114",
        "    1          57          57           0              114",
        "step time 114 s, overlap 50.0%, bubble 0.0%",
    ]
