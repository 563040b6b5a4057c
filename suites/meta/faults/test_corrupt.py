"""Damaged data on the simulated cluster: the result of one rank, or the input that one rank gives to all."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_replicas_in_sync
from pdlcheck.errors import Inconclusive
from pdlcheck.faults import Corrupt, Kill, Stall
from pdlcheck.primitives import broadcast_parameters
from pdlcheck.worlds import get_world

SEMANTICS = ["rendezvous", "buffered", "gloo", "nccl"]


def reduce_twice(async_op=False):
    """Return sums of ``[rank + 1, 10]`` and ``[rank + 2, 20]``; check that the rank's own values stay."""
    rank, sums = dist.get_rank(), []
    for number in (1, 2):
        own = torch.tensor([rank + number, 10.0 * number])
        outputs = [torch.zeros(2) for _ in range(dist.get_world_size())]
        work = dist.all_gather(outputs, own, async_op=async_op)
        if async_op:
            work.wait()
        assert own.tolist() == [rank + number, 10.0 * number]
        sums.append(torch.stack(outputs).sum(0).tolist())
    return sums


def run(*faults, fn=reduce_twice, semantics="rendezvous", world_size=2, **kwargs):
    return get_world("sim", faults=faults, semantics=semantics).run(fn, world_size=world_size, **kwargs)


RIGHT = [[3.0, 20.0], [5.0, 40.0]]


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_nan_in_the_output_is_on_one_rank_alone(semantics, async_op):
    zero, one = run(Corrupt(1, 1, element=1), semantics=semantics, async_op=async_op)
    assert zero == RIGHT
    assert one[0] == RIGHT[0]
    assert one[1][0] == 5.0
    assert math.isnan(one[1][1])


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_nan_in_the_input_reaches_all_ranks_and_not_the_senders_tensor(semantics, async_op):
    for sums in run(Corrupt(1, 1, where="input", element=1), semantics=semantics, async_op=async_op):
        assert sums[0] == RIGHT[0]
        assert sums[1][0] == 5.0
        assert math.isnan(sums[1][1])


def test_a_flipped_bit():
    zero, one = run(Corrupt(1, 0, how="bit_flip", bit=-1))  # the sign of rank 0's first value
    assert zero == RIGHT
    assert one == [[1.0, 20.0], [5.0, 40.0]]
    assert run(Corrupt(0, 0, how="bit_flip", bit=23, where="input")) == [[[2.5, 20.0], RIGHT[1]]] * 2  # 0.5, not 1.0
    zero, one = run(Corrupt(0, 0, how="bit_flip", where="input", element=1))
    assert zero == one != RIGHT


@pytest.mark.parametrize(
    ("dtype", "value", "bit", "wrong"),
    [
        (torch.bool, True, 0, False),
        (torch.int64, 1, 40, 1 + 2**40),
        (torch.int8, 1, -1, -127),
        (torch.bfloat16, 1.0, -1, -1.0),
    ],
)
def test_a_bit_of_any_dtype(dtype, value, bit, wrong):
    def send():
        x = torch.full((3,), value, dtype=dtype)
        dist.broadcast(x, 0)
        return x.tolist()

    zero, one, two = run(Corrupt(1, 0, "bit_flip", element=2, bit=bit), fn=send, world_size=3)
    assert zero == two == [value] * 3
    assert one == [value, value, wrong]


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_stale_output_keeps_what_it_held_and_a_stale_input_is_given_twice(semantics, async_op):
    zero, one = run(Corrupt(1, 1, "stale"), semantics=semantics, async_op=async_op)
    assert (zero, one) == (RIGHT, [RIGHT[0], [0.0, 0.0]])
    given = run(Corrupt(1, 1, "stale", "input"), semantics=semantics, async_op=async_op)
    assert given == [[RIGHT[0], [4.0, 30.0]]] * 2


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_messages(semantics):
    def ring():
        rank, size = dist.get_rank(), dist.get_world_size()
        own, taken = torch.full((2,), float(rank)), torch.full((2,), -1.0)
        work = dist.isend(own, (rank + 1) % size)  # operation 0
        dist.recv(taken, (rank - 1) % size)
        work.wait()
        return own.tolist(), taken.tolist()

    right = run(fn=ring, semantics=semantics, world_size=3)
    sent = run(Corrupt(1, 0, "bit_flip", "input", bit=-1), fn=ring, semantics=semantics, world_size=3)
    assert sent == [right[0], right[1], ([2.0, 2.0], [-1.0, 1.0])]
    stale = run(Corrupt(1, 1, "stale"), fn=ring, semantics=semantics, world_size=3)
    assert stale == [right[0], ([1.0, 1.0], [-1.0, -1.0]), right[2]]


def start():
    model = torch.nn.Linear(2, 1)
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().mean().backward()
        flat = torch.cat([model.weight.grad.flatten(), model.bias.grad])
        dist.all_reduce(flat)
        model.weight.grad, model.bias.grad = flat[None, :2], flat[2:]
        optimizer.step()

    return model, step


@pytest.mark.parametrize("how", ["nan", "bit_flip", "stale"])
def test_the_check_of_replicas_sees_damage_on_one_rank(how):
    check_replicas_in_sync(start, get_world("sim"))
    with pytest.raises(AssertionError, match="rank 1"):
        check_replicas_in_sync(start, get_world("sim", faults=[Corrupt(1, 4, how)]))


def test_two_faults_in_one_run():
    zero, one = run(Corrupt(0, 0, "stale"), Corrupt(1, 1, "bit_flip", bit=-1))
    assert (zero, one) == ([[0.0, 0.0], RIGHT[1]], [RIGHT[0], [1.0, 40.0]])


def reduce_integers():
    dist.all_reduce(torch.ones(2, dtype=torch.int32))
    dist.barrier()


def reduce_zeros():
    for _ in range(2):
        dist.all_reduce(torch.zeros(2))


@pytest.mark.parametrize(
    ("fault", "fn", "reason"),
    [
        (Corrupt(1, 5), reduce_twice, "the rank posts fewer operations"),
        (Corrupt(1, 0), reduce_integers, "carries int32, which has no NaN; use how='bit_flip'"),
        (Corrupt(1, 0, "bit_flip", element=2), reduce_integers, "has 2 elements in its output; element 2 is none"),
        (Corrupt(1, 0, "bit_flip", bit=32), reduce_integers, "has elements of 32 bits; bit 32 is none of them"),
        (Corrupt(1, 1), reduce_integers, "barrier.* has no output on this rank"),
        (Corrupt(1, 0, "stale", "input"), reduce_twice, "has none of its kind, shapes and dtypes before it"),
        (Corrupt(1, 1, "stale", "input"), reduce_zeros, "gives what the one before it gave"),
        (Corrupt(1, 0, "stale"), reduce_zeros, "gets what its output held before"),
    ],
)
def test_damage_that_cannot_be_done_is_no_pass(fault, fn, reason):
    with pytest.raises(Inconclusive, match=rf"Corrupt\(.* did not come about: .*{reason}"):
        run(fault, fn=fn)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Kill(-1, 0), "Kill: rank is counted from 0, got -1; pass an int of at least 0"),
        (lambda: Stall(0, -2), "Stall: operation is counted from 0, got -2"),
        (lambda: Stall(0, True), "Stall: operation is counted from 0, got True"),
        (lambda: Corrupt(0, 0, element=0.5), "Corrupt: element is counted from 0, got 0.5"),
        (lambda: Corrupt(0, 0, how="zero"), "Corrupt: how must be one of nan, bit_flip, stale; got 'zero'"),
        (lambda: Corrupt(0, 0, where="rank"), "Corrupt: where must be one of input, output; got 'rank'"),
        (lambda: Corrupt(0, 0, bit="top"), "Corrupt: bit is counted .* got 'top'; pass an int"),
        (lambda: get_world("sim", faults=Kill(0, 0)), "faults must be a list of faults, got Kill.*; pass faults="),
        (lambda: get_world("sim", faults=["kill"]), "faults must be Absent, .*, Slow and Stall .* got 'kill'"),
        (lambda: run(Stall(2, 0)), "faults: Stall.* is about rank 2 of 2; name a rank from 0 to 1"),
    ],
)
def test_a_fault_that_cannot_be_meant_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
