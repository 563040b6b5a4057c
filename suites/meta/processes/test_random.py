"""Drawn programs of watched processes, correct by construction, behave as on sim: no hang, no false verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdlcheck.worlds import get_world

from ..needs_mpi import needs_mpi

PAUSES_S = (0.003, 0.03)  # shorter and longer than a rank waits before it asks the controller


class Step(NamedTuple):
    """One step; ranks take steps in one order, so a waiting rank waits for one that is not ahead."""

    what: str
    rank: int  # the root, the sender, or the rank that pauses or waits
    other: int  # the receiver
    pending: tuple[bool, ...]  # for each rank: it does not wait yet
    tag: int  # of a message; of a pause: its index
    otherwise: bool  # odd ranks give their tensor another name


def steps(world_size: int) -> st.SearchStrategy[Step]:
    ranks = st.integers(0, world_size - 1)
    pending = st.tuples(*[st.booleans()] * world_size)
    what = st.sampled_from(["all_reduce", "broadcast", "barrier", "message", "message", "pause", "wait"])
    drawn = st.builds(Step, what, ranks, ranks, pending, st.integers(0, 1), st.booleans())
    return drawn.filter(lambda step: step.what != "message" or step.rank != step.other)


def run_steps(program: list[Step], pauses_s: Sequence[float]) -> list[list[float]]:
    me, works, tensors = dist.get_rank(), [], []

    def keep(work, tensor, step):
        tensors.append(tensor)
        works.append(work)
        if not step.pending[me]:
            works.pop().wait()

    for number, step in enumerate(program):
        tensor = torch.tensor([float(number), 1.0 + me])
        if step.what == "pause":
            time.sleep(pauses_s[step.tag] if me == step.rank else 0.0)
        elif step.what == "wait":
            if me == step.rank and works:
                works.pop(number % len(works)).wait()
        elif step.what == "message":
            if me == step.rank:
                keep(dist.isend(tensor, step.other, tag=step.tag), tensor, step)
            elif me == step.other:
                keep(dist.irecv(tensor, step.rank, tag=step.tag), tensor, step)
        elif step.what == "barrier":
            keep(dist.barrier(async_op=True), tensor, step)
        elif step.what == "broadcast":
            keep(dist.broadcast(tensor, step.rank, async_op=True), tensor, step)
        elif step.otherwise and me % 2:
            another = tensor
            del tensor
            keep(dist.all_reduce(another, async_op=True), another, step)
        else:
            keep(dist.all_reduce(tensor, async_op=True), tensor, step)
    for work in works:
        work.wait()
    return [tensor.tolist() for tensor in tensors]


@pytest.fixture(scope="module", params=["gloo", pytest.param("mpi", marks=needs_mpi)])
def processes(request):
    world = get_world(request.param)
    yield world
    world.close()


@pytest.mark.parametrize("world_size", [2, 3])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_right_programs_do_what_they_do_on_sim(processes, world_size, data):
    program = data.draw(st.lists(steps(world_size), min_size=3, max_size=30))
    expected = get_world("sim").run(run_steps, program, (0.0, 0.0), world_size=world_size)
    assert processes.run(run_steps, program, PAUSES_S, world_size=world_size) == expected
