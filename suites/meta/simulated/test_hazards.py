"""Buffers of pending operations, leaked work, and the choices that torch's rules leave to a network."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

from pdlcheck.errors import BufferHazard, Deadlock, LeakedWork, Unsupported
from pdlcheck.strategies import semantics as any_semantics
from pdlcheck.worlds import get_world
from pdlcheck.worlds.semantics import Semantics, make_semantics

from ..catalogue import FAULTS, INNOCENT, false_alarm_traps, hazards, leaks, messages
from ..catalogue.hazards import peer
from . import network_programs

LEAKS = [fault.program for fault in FAULTS if fault.file == "leaks.py"]

SILENT = {"poison": False, "hazards": False, "leaks": False}  # as on a real backend


# torch warns of names that it renames from release to release
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def run(program, *args, semantics="rendezvous", seed=0, world_size=2):
    return get_world("sim", seed=seed, semantics=semantics).run(program, *args, world_size=world_size)


# -- buffer hazards: found and silent twins are in test_catalogue.py ---------------------------------


@pytest.mark.parametrize(
    ("dtype", "early"),
    [(torch.float32, "nan"), (torch.bfloat16, "nan"), (torch.complex64, "nan"), (torch.int64, str(-(2**63))),
     (torch.uint8, "255"), (torch.bool, "True")],
    ids=str,
)  # fmt: skip
def test_what_is_read_too_early_is_poison(dtype, early):
    def program():
        x = torch.zeros(1, dtype=dtype)
        work = dist.irecv(x, 0) if dist.get_rank() else dist.isend(x, 1)
        seen = str(x.item())
        work.wait()
        return seen, x.item()

    seen, after = run(program, semantics=Semantics(hazards=False))[1]
    assert early in seen
    assert after == 0


def test_without_the_checks_the_faults_are_silent():
    for fault in FAULTS:
        if fault.verdict is BufferHazard:
            run(fault.program, False, semantics=make_semantics(**SILENT))


@pytest.mark.parametrize("data", ["at_once", "at_wait", "random"])
def test_without_poison_only_the_user_is_told_of_a_hazard(data):
    """The network delivers in the thread of the last rank to arrive, whose own output is still pending."""
    semantics = Semantics(poison=False, data=data)

    def early_or_late(is_late):
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        if is_late:
            work.wait()
        return x.sum().item(), work.wait()

    assert run(early_or_late, True, semantics=semantics) == [(4.0, True)] * 2
    with pytest.raises(BufferHazard, match="reads the output"):
        run(early_or_late, False, semantics=semantics)


def written_past_torch():
    """Return rank 1's value of a buffer that rank 0 writes through numpy between two barriers."""
    x = torch.ones(1)
    if dist.get_rank() == 1:
        work = dist.irecv(x, 0)
        dist.barrier()
        dist.barrier()
        work.wait()
        return x.item()
    memory = x.numpy()
    work = dist.isend(x, 1)
    dist.barrier()
    memory[0] = 2.0
    dist.barrier()
    return work.wait()


@pytest.mark.parametrize(("data", "received"), [("at_once", {1.0}), ("at_wait", {2.0}), ("random", {1.0, 2.0})])
def test_a_write_that_nobody_sees_shows_when_the_data_is_read_late(data, received):
    """There is only one schedule, so the network alone determines the moment."""
    worlds = [get_world("sim", semantics=Semantics(data=data), schedule="first", seed=seed) for seed in range(20)]
    assert {world.run(written_past_torch, world_size=2)[1] for world in worlds} == received


def test_modes_of_the_user_come_and_go_above_the_watch():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import FlopCounterMode

    def program(early):
        x = torch.ones(3, 3)
        with FlopCounterMode(display=False):
            work = dist.all_reduce(x, async_op=True)
        with FlopCounterMode(display=False) as counter:
            if not early:
                work.wait()
            x @ x
        work.wait()
        return counter.get_total_flops(), len(_get_current_dispatch_mode_stack())

    assert run(program, False) == [(54, 0)] * 2
    with pytest.raises(BufferHazard):
        run(program, True)


# -- leaked work ----------------------------------------------------------------------------------


@pytest.mark.parametrize("program", LEAKS, ids=lambda program: program.__name__)
def test_leaks_that_are_meant_can_be_allowed(program):
    with pytest.raises(LeakedWork):
        run(program, False, semantics=make_semantics())
    run(program, False, semantics=make_semantics(leaks=False))


def test_a_message_that_nobody_received_is_a_leak_where_sends_are_buffered():
    with pytest.raises(LeakedWork, match=r"rank 0: send to rank 1 .*; the message was never received"):
        run(messages.never_received, False, semantics="buffered")
    with pytest.raises(Deadlock):
        run(messages.never_received, False)


def sends_alone():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(2), 1)


def test_each_kind_of_leak_has_a_switch_of_its_own():
    unwaited, unreceived = make_semantics(unwaited=False), make_semantics("buffered", unreceived=False)
    run(leaks.handle_is_dropped, False, semantics=unwaited)
    run(leaks.sent_and_forgotten, False, semantics=unwaited)
    run(messages.never_received, False, semantics=unreceived)
    with pytest.raises(LeakedWork, match="nobody waited for it"):
        run(leaks.handle_is_dropped, False, semantics=unreceived)
    for semantics in (unwaited, make_semantics("buffered", unwaited=False)):
        with pytest.raises(LeakedWork, match=r"1 operation was left behind\n.*; the message was never received"):
            run(sends_alone, semantics=semantics)
    for semantics in (make_semantics(unwaited=False, unreceived=False), make_semantics(leaks=False)):
        run(sends_alone, semantics=semantics)


def test_ranks_are_fit_for_use_after_a_leak():
    with get_world("sim").open(2) as ranks:
        with pytest.raises(LeakedWork):
            ranks.run(leaks.handle_is_dropped, False)
        ranks.run(leaks.handle_is_dropped, True)


# -- choices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("semantics", "ends"),
    [
        (Semantics(), False),
        (make_semantics("gloo"), False),
        (make_semantics("nccl"), False),
        (Semantics(send="eager", eager_bytes=15), False),
        (Semantics(send="eager", eager_bytes=16), True),
        (Semantics(send="buffered"), True),
    ],
    ids=["rendezvous", "gloo", "nccl", "eager-15", "eager-16", "buffered"],
)
def test_two_sends_head_to_head_end_only_where_sends_are_buffered(semantics, ends):
    assert run(network_programs.head_to_tail, 4, semantics=semantics) == [1.0, 0.0]
    if ends:
        assert run(network_programs.head_to_head, 4, semantics=semantics) == [1.0, 0.0]
    else:
        with pytest.raises(Deadlock) as caught:
            run(network_programs.head_to_head, 4, semantics=semantics)
        assert sorted(caught.value.cycle) == [0, 1]


def test_messages_in_order_let_only_a_batch_cross():
    assert run(network_programs.both_post_their_send_first) == [1.0, 0.0]
    with pytest.raises(Deadlock) as caught:
        run(network_programs.both_post_their_send_first, semantics="nccl")
    assert sorted(caught.value.cycle) == [0, 1]
    assert run(network_programs.both_post_a_batch, semantics="nccl") == [1.0, 0.0]


@pytest.mark.parametrize("order", sorted({*itertools.permutations(["send", "send", "recv", "recv"])}), ids="-".join)
@pytest.mark.parametrize("semantics", ["nccl", "rendezvous"])
def test_a_rank_may_send_to_itself_in_a_batch(order, semantics):
    assert run(network_programs.a_batch_to_oneself, order, semantics=semantics) == [[1.0, 2.0]] * 2


def test_a_second_wait_says_that_it_is_one():
    program = messages.waits_again_for_a_message
    with pytest.raises(Deadlock, match=r"rank 0: blocked in a second wait, at .*messages.py:45, for send to rank 1"):
        run(program, False)
    assert run(program, False, semantics="nccl")[1] == [2.0, 2.0]
    assert run(false_alarm_traps.waits_twice) == [[3.0, 3.0]] * 2  # allowed for a collective


def _begun(tensors, group=None):
    return [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]


def waits_for_the_last():
    """Wait for the last collective only; it is enough on nccl, whose stream runs them one after the other."""
    tensors = [torch.ones(2) for _ in range(3)]
    _begun(tensors)[-1].wait()
    return [tensor.tolist() for tensor in tensors]


def waits_for_the_first():
    other = dist.new_group([0, 1])
    tensors = [torch.ones(2) for _ in range(3)]
    works = _begun(tensors)
    _begun([torch.ones(2)], other)[0].wait()  # by now both ranks have begun all three
    works[0].wait()
    seen = [tensor.tolist() for tensor in tensors]
    for work in works[1:]:
        work.wait()
    return seen


def waits_on_another_group():
    other = dist.new_group([0, 1])
    tensors = [torch.ones(2) for _ in range(2)]
    works = _begun(tensors)
    _begun([torch.ones(2) for _ in range(4)], other)[-1].wait()  # it has the higher number
    seen = [tensor.tolist() for tensor in tensors]
    for work in works:
        work.wait()
    return seen


def waits_after_a_message():
    x = torch.ones(2) * dist.get_rank()
    message = dist.irecv(x, 0) if dist.get_rank() else dist.isend(x, 1)
    _begun([torch.ones(2)])[0].wait()
    seen = x.tolist()
    message.wait()
    return seen


def test_on_a_stream_who_has_waited_for_a_collective_has_waited_for_those_before_it():
    assert run(waits_for_the_last, semantics="nccl") == [[[2.0, 2.0]] * 3] * 2
    says = r"on nccl, .* it has ended before all_reduce, collective 2; .* semantics\('nccl'\)"
    for profile in ("rendezvous", "gloo"):
        with pytest.raises(BufferHazard, match=rf"rank . reads the output of a pending operation(?s:.*){says}"):
            run(waits_for_the_last, semantics=profile)
    with pytest.raises(LeakedWork, match=rf"nobody waited for it(?s:.*){says}"):
        run(waits_for_the_last, semantics=Semantics(hazards=False))


@pytest.mark.parametrize("program", [waits_for_the_first, waits_on_another_group, waits_after_a_message])
def test_but_not_for_later_ones_nor_those_of_another_group_nor_messages(program):
    for profile in ("nccl", "rendezvous"):
        with pytest.raises(BufferHazard, match="of a pending operation") as raised:
            run(program, semantics=profile)
        assert "on nccl" not in str(raised.value)


def test_a_message_is_complete_for_those_who_ask_before_or_after_the_wait():
    def program():
        work = dist.irecv(torch.zeros(1), 0) if dist.get_rank() else dist.isend(torch.ones(1), 1)
        dist.barrier()
        before = work.is_completed(), work.is_success()
        work.wait()
        return before, (work.is_completed(), work.is_success())

    for polls, before in (("answered", True), ("after_wait", False)):
        assert run(program, semantics=Semantics(polls=polls)) == [((before, before), (True, True))] * 2


def test_a_reduce_scatter_is_complete_for_a_poll_as_a_message_is():
    """On gloo a loop that polls it never ends."""

    def program():
        output = torch.zeros(2)
        work = dist.reduce_scatter(output, [torch.ones(2)] * 2, async_op=True)
        dist.barrier()
        before = work.is_completed()
        work.wait()
        return before, output.tolist()

    for polls, before in (("answered", True), ("after_wait", False)):
        assert run(program, semantics=Semantics(polls=polls)) == [(before, [2, 2])] * 2


class Seen(TorchDispatchMode):
    """A mode that records the tensor operations that a rank's own mode sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("send", ["rendezvous", "buffered"])
def test_what_the_network_does_to_tensors_no_mode_of_a_rank_sees(send):
    def program():
        x, y = torch.ones(2), torch.zeros(2)
        with Seen() as seen:
            for work in [dist.isend(x, peer()), dist.irecv(y, peer())]:
                work.wait()
            dist.all_reduce(y, async_op=True).wait()
            ours = list(seen.names)
            y + 1
        return ours, seen.names[len(ours) :], y.tolist()

    assert run(program, semantics=Semantics(send=send)) == [([], ["aten.add.Tensor"], [2.0, 2.0])] * 2


def test_tags_are_ignored_where_messages_are_in_order():
    assert run(network_programs.tags, (2, 1))[1] == {1: 1.0, 2: 2.0}
    assert run(network_programs.tags, (2, 1), semantics="nccl")[1] == {1: 2.0, 2: 1.0}
    assert run(network_programs.tags, (1, 2), semantics="nccl")[1] == {1: 1.0, 2: 2.0}


def test_nccl_refuses_a_receive_from_any_rank():
    def program():
        return dist.send(torch.ones(1), 0) if dist.get_rank() else dist.recv(torch.zeros(1))

    assert run(program)[0] == 1
    with pytest.raises(Unsupported, match="name the source"):
        run(program, semantics="nccl")


def test_the_order_of_adding_shows_in_float32_and_is_the_same_on_every_rank():
    assert run(network_programs.summed_in_float32, world_size=3) == [0.0] * 3
    sums = set()
    for semantics in (Semantics(), Semantics(reduce="reversed"), Semantics(reduce="random")):
        for seed in range(6):
            values = run(network_programs.summed_in_float32, semantics=semantics, seed=seed, world_size=3)
            assert len(set(values)) == 1
            sums.add(values[0])
    assert sums == {0.0, 1.0}


def test_the_reversed_order_adds_the_last_rank_first():
    def program():
        x = torch.tensor([1.0, 1e8, -1e8][dist.get_rank()])
        dist.all_reduce(x)
        return x.item()

    assert run(program, world_size=3) == [0.0] * 3
    assert run(program, semantics=Semantics(reduce="reversed"), world_size=3) == [1.0] * 3


def test_callbacks_of_futures_may_run_in_any_order():
    def program():
        order = []
        futures = []
        for i in range(4):
            future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
            futures.append(future.then(lambda _, i=i: order.append(i)))
        for future in futures:
            future.wait()
        return order

    def orders(completion):
        found = [run(program, semantics=Semantics(completion=completion), seed=seed) for seed in range(10)]
        return {tuple(order) for run in found for order in run}

    assert orders("in_order") == {(0, 1, 2, 3)}
    assert len(orders("random")) > 1


def test_semantics_replay_with_their_seed():
    def seen():
        return [run(false_alarm_traps.waits_in_another_order, semantics="gloo", seed=seed) for seed in range(5)]

    assert seen() == seen()


@given(semantics=any_semantics())
def test_a_correct_program_is_correct_under_all_semantics(semantics):
    for program, expected in INNOCENT:
        assert run(program, semantics=semantics) == [expected] * 2
    with pytest.raises(BufferHazard):
        run(hazards.irecv_then_use, False, semantics=semantics)


# -- how semantics are chosen ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"send": "fast"}, ValueError, "send must be one of rendezvous, eager, buffered; got 'fast'"),
        ({"data": "late"}, ValueError, "data must be one of at_once, at_wait, random; got 'late'"),
        ({"send": "eager"}, ValueError, "eager_bytes must be at least 1 with send='eager', and 0 otherwise; got 0"),
        ({"eager_bytes": 4}, ValueError, "got 4 with send='rendezvous'"),
        ({"send": "eager", "eager_bytes": 1.5}, TypeError, "eager_bytes must be an int, got 1.5"),
        ({"poison": 1}, TypeError, "poison must be True or False, got 1"),
    ],
)
def test_unknown_values_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Semantics(**arguments)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="semantics must be one of buffered, gloo, nccl, rendezvous; got 'mpi'"):
        get_world("sim", semantics="mpi")
    with pytest.raises(TypeError, match="semantics has no 'tags'; it has send, eager_bytes"):
        make_semantics("nccl", tags=False)
    with pytest.raises(TypeError, match="semantics must be a Semantics or the name of a profile, got 3"):
        make_semantics(3)


SOURCE = """
import pytest, torch, torch.distributed as dist

def exchange():
    x, y, peer = torch.ones(2), torch.zeros(2), 1 - dist.get_rank()
    dist.send(x, peer)
    dist.recv(y, peer)

@pytest.mark.world_size(2)
def test_unmarked(rank):
    exchange()

@pytest.mark.semantics("buffered")
@pytest.mark.world_size(2)
def test_profile(rank):
    exchange()

@pytest.mark.semantics(send="eager", eager_bytes=8)
@pytest.mark.world_size(2)
def test_values(rank):
    exchange()

@pytest.mark.semantics(send="eager", eager_bytes=8)
def test_controller(world):
    world.run(exchange, world_size=2)

@pytest.mark.semantics(leaks=False)
@pytest.mark.world_size(2)
def test_leak_that_is_meant(rank):
    dist.all_reduce(torch.ones(2), async_op=True)

@pytest.mark.world_size(2)
def test_leak(rank):
    dist.all_reduce(torch.ones(2), async_op=True)
"""


def test_a_marker_or_the_option_chooses_the_semantics(pytester):
    pytester.makepyfile(SOURCE)
    result = pytester.runpytest_inprocess("--world", "sim", "-p", "no:cacheprovider", "-v")
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(["*::test_unmarked?sim-2? FAILED*", "*::test_leak?sim-2? FAILED*"])
    result.stdout.fnmatch_lines(["*LeakedWork: all ranks have returned, and 2 operations were left behind*"])
    result = pytester.runpytest_inprocess("--world", "sim", "-p", "no:cacheprovider", "--semantics", "buffered")
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["*::test_leak?sim-2?' --world sim --pdl-seed=0 --semantics buffered"])


def test_a_marker_that_cannot_be_meant_fails_the_test(pytester):
    pytester.makepyfile(
        """
import pytest

@pytest.mark.semantics("fast")
@pytest.mark.world_size(2)
def test_name(rank): ...

@pytest.mark.semantics(speed=1)
@pytest.mark.world_size(2)
def test_value(rank): ...
"""
    )
    result = pytester.runpytest_inprocess("--world", "sim", "-p", "no:cacheprovider")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*semantics must be one of*got 'fast'*", "*semantics has no 'speed'*"])


def test_the_watch_ends_though_a_hook_has_waited():
    """After a backward pass torch restores the modes that were active at its beginning."""

    def waits_in_a_hook():
        x, y = torch.ones(1, requires_grad=True), torch.ones(1)
        work = dist.all_reduce(y, async_op=True)
        x.register_hook(lambda gradient: None if work.wait() else gradient)
        (2 * x).sum().backward()
        dist.all_reduce(y, async_op=True).wait()
        return torch._C._len_torch_dispatch_stack()

    world = get_world("sim")
    assert world.run(waits_in_a_hook, world_size=2) == [0, 0]
    assert world.run(torch._C._len_torch_dispatch_stack, world_size=2) == [0, 0]


@pytest.mark.parametrize(
    ("semantics", "shown"),
    [
        ("rendezvous", ""),
        ("nccl", ", semantics='nccl'"),
        (Semantics(leaks=False), ", semantics=Semantics(leaks=False)"),
    ],
    ids=["default", "profile", "changed"],
)
def test_a_replay_shows_the_semantics_in_the_fewest_words(semantics, shown):
    assert repr(get_world("sim", semantics=semantics)) == f"SimulatedWorld(seed=0, schedule='random:0'{shown})"
