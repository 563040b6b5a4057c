"""Ranks that serve several worlds one after the other show each of them the state of new ranks."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._python_dispatch import TorchDispatchMode

from pdlcheck.errors import Deadlock
from pdlcheck.worlds import get_world
from pdlcheck.worlds.semantics import make_semantics

SIZE = 2
_mark = threading.local()


def new_or_kept():
    kept, _mark.seen = getattr(_mark, "seen", False), True
    return "kept" if kept else "new"


def run(program, **options):
    return get_world("sim", **options).run(program, world_size=SIZE)


@pytest.fixture(autouse=True)
def kept_ranks():
    """Run some ranks before, so that the world under test gets them."""
    run(new_or_kept)
    assert run(new_or_kept) == ["kept", "kept"]


# -- what a run may leave in its threads and groups ------------------------------------------------------------------


def leaves_gradients_off():
    torch.set_grad_enabled(False)


def leaves_inference_mode():
    _mark.guard = torch.inference_mode()  # the mode ends when its guard is deleted
    _mark.guard.__enter__()


def leaves_autocast():
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()


def leaves_a_default_device():
    torch.set_default_device("meta")


class _Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) * 2


def leaves_a_dispatch_mode():
    _Doubling().__enter__()


def leaves_a_group():
    dist.new_group([0])


def leaves_no_group():
    dist.destroy_process_group()


LEFTOVERS = [
    leaves_gradients_off,
    leaves_inference_mode,
    leaves_autocast,
    leaves_a_default_device,
    leaves_a_dispatch_mode,
    leaves_a_group,
    leaves_no_group,
]


def surroundings():
    x = torch.ones(2, 2, requires_grad=True)
    product = x @ x
    number = dist.new_group([0, 1]).group_name
    return product.requires_grad, str(product.dtype), str(product.device), product.is_inference(), number


@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_ranks_that_a_run_has_changed_are_not_kept(leftover):
    def runs():
        new_or_kept()
        leftover()

    expected = run(surroundings)
    run(runs)
    assert run(surroundings) == expected
    run(runs)
    assert run(new_or_kept) == ["new", "new"]


def test_ranks_that_have_failed_are_not_kept():
    with pytest.raises(Deadlock):
        run(lambda: dist.recv(torch.ones(1), 1 - dist.get_rank()))
    assert run(new_or_kept) == ["new", "new"]


# -- what is undone for those that are kept --------------------------------------------------------------------------


def test_the_next_world_finds_an_empty_store():
    def meets():
        return _get_default_store().add("visitors", 1)

    assert sorted(run(meets)) == [1, 2]
    assert sorted(run(meets)) == [1, 2]
    assert run(new_or_kept) == ["kept", "kept"]


def test_the_next_world_counts_its_collectives_from_zero():
    def second_is_missing():
        dist.barrier()
        if dist.get_rank() == 0:
            dist.barrier()

    for _ in range(2):
        run(dist.barrier)
        with pytest.raises(Deadlock, match="collective 1"):
            run(second_is_missing)
        run(dist.barrier)


def test_a_program_may_initialise_its_group_in_each_world():
    def initialises():
        dist.init_process_group("nccl")
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("nccl")

    run(initialises)
    run(initialises)
    assert run(new_or_kept) == ["kept", "kept"]


def test_the_next_world_has_its_own_seed():
    def draws():
        return torch.rand(1).item()

    first, second = run(draws, seed=1), run(draws, seed=2)
    assert run(draws, seed=1) == first != second
    assert run(new_or_kept) == ["kept", "kept"]


def test_the_next_world_has_its_own_semantics():
    def sends_first():
        peer = 1 - dist.get_rank()
        dist.send(torch.ones(1), peer)
        dist.recv(torch.zeros(1), peer)

    run(sends_first, semantics="buffered")
    with pytest.raises(Deadlock):
        run(sends_first)


def test_the_next_world_receives_no_message_that_was_left():
    def sends_to_nobody():
        if dist.get_rank() == 0:
            x = torch.ones(1)
            sent.append(weakref.ref(x))
            dist.isend(x, 1)

    def receives_from_nobody():
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(1), 0)

    sent = []
    run(sends_to_nobody, semantics=make_semantics(leaks=False))
    gc.collect()
    assert sent[0]() is None
    assert run(new_or_kept) == ["kept", "kept"]
    run(sends_to_nobody, semantics=make_semantics(leaks=False))
    with pytest.raises(Deadlock):
        run(receives_from_nobody)


def test_idle_ranks_hold_neither_arguments_nor_results():
    class Model:
        pass

    def returns(model):
        seen.append(weakref.ref(model))
        return model

    seen = []
    given = Model()
    results = get_world("sim").run(returns, given, world_size=SIZE)
    seen.append(weakref.ref(given))
    del results, given
    gc.collect()
    assert [held() for held in seen] == [None] * (SIZE + 1)
    assert run(new_or_kept) == ["kept", "kept"]


def test_a_forked_process_starts_ranks_of_its_own():
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # without its threads the run would hang
        os._exit(0 if run(new_or_kept) == ["new", "new"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run(new_or_kept) == ["kept", "kept"]


def test_few_world_sizes_are_kept():
    before = threading.active_count()
    for world_size in range(1, 20):
        get_world("sim").run(dist.barrier, world_size=world_size)
    assert threading.active_count() - before <= 19 + 18 + 17 + 16
