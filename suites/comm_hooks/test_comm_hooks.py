"""Communication hooks: their guarantees, in 16 bits and otherwise, and the bytes that they send."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from pdlcheck.checks import check_comm_hook, check_replicas_in_sync
from pdlcheck.primitives import PowerSGDState, TopKState, fp16_compress, power_sgd, top_k

from .models import MATRICES, applied, drawn, quarter, rank_one, rank_two_later, residual, wrappers

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SEMANTICS = pytest.mark.parametrize("semantics", ["rendezvous", "gloo", "nccl"])


# guarantees of every hook


@pytest.mark.verifies("fp16_compress")
@pytest.mark.schedules(2)
def test_fp16_compress_is_the_mean(subject, world):
    # two roundings of float16 for each rank added, 2**-11 each
    check_comm_hook(lambda module: (None, subject), world, relative=2**-9, dtypes=FLOATS[:3], steps=4)


@pytest.mark.verifies("bf16_compress")
@pytest.mark.schedules(2)
def test_bf16_compress_is_the_mean(subject, world):
    check_comm_hook(lambda module: (None, subject), world, relative=2**-6, dtypes=FLOATS, steps=4)


@pytest.mark.verifies("top_k")
@pytest.mark.schedules(2)
@pytest.mark.parametrize("unused", [False, True], ids=["used", "unused"])
def test_top_k_sends_in_the_end_what_it_keeps(subject, world, unused):
    def make(module):
        return TopKState(module, ratio=0.25), subject

    check_comm_hook(make, world, error_feedback=not unused, residual=residual, unused=unused, dtypes=FLOATS[unused::2])


@pytest.mark.slow
@pytest.mark.verifies("power_sgd")
@pytest.mark.schedules(2)
@pytest.mark.parametrize("unused", [False, True], ids=["used", "unused"])
def test_power_sgd_sends_in_the_end_what_it_keeps(subject, world, unused):
    def make(module):
        return PowerSGDState(module, start_step=1), subject

    check_comm_hook(make, world, error_feedback=not unused, residual=residual, unused=unused, dtypes=FLOATS[unused::2])


@pytest.mark.verifies("power_sgd")
@pytest.mark.semantics("gloo")
@pytest.mark.schedules(10)
@wrappers
@pytest.mark.parametrize("bucket_bytes", [1, 128, 10**6])
def test_power_sgd_meets_in_the_same_operations_whatever_completes_first(subject, world, bucket_bytes, wrapper):
    def train():
        grads = drawn(3, 3, MATRICES)
        found, _ = applied(lambda m: (rank_one(m)[0], subject), grads, wrapper=wrapper, bucket_bytes=bucket_bytes)
        return torch.cat([g.flatten() for step in found for g in step])

    first, *others = world.run(train, world_size=3)
    assert all(torch.equal(first, other) for other in others)


@SEMANTICS
@wrappers
@pytest.mark.parametrize(
    "make", [lambda m: (None, fp16_compress), quarter, rank_one, rank_two_later], ids=["fp16", "top_k", "psgd", "later"]
)
def test_replicas_train_alike_under_every_hook(make, semantics, wrapper):
    from pdlcheck.worlds import get_world

    def start():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        ddp = wrapper(model, bucket_cap_mb=100 / 2**20)
        ddp.register_comm_hook(*make(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(i):
            optimizer.zero_grad()
            ddp(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()

        return model, step

    for schedule in ("first", "random:1", "pct:2,3,200"):
        check_replicas_in_sync(start, get_world("sim", semantics=semantics, schedule=schedule), steps=5)


# 16-bit


@pytest.mark.beyond_contract("means beyond what float16 can add up")
@pytest.mark.verifies("fp16_compress")
@wrappers
def test_fp16_compress_takes_gradients_beyond_its_range_whose_mean_is_within(subject, world, wrapper):
    def step():
        grads = [[[torch.tensor([value, 1.0])]] for value in (120_000.0, -60_000.0, 3.0)]
        return applied(lambda m: (None, subject), grads, wrapper=wrapper, dtype=torch.float32)[0][0][0].tolist()

    for found in world.run(step, world_size=3):
        assert found == pytest.approx([20_001, 1], rel=2**-9)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.verifies(name), id=name)
        for name in ("bf16_compress", "fp16_compress", "power_sgd", "top_k")
    ],
)
@wrappers
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_of_one_rank_reaches_all(name, subject, world, bad, wrapper):
    states = {"top_k": lambda m: TopKState(m, ratio=0.25), "power_sgd": lambda m: rank_one(m)[0]}

    def step():
        grads = drawn(3, 2, MATRICES)
        for place in range(3):
            grads[1][0][place].view(-1)[2] = bad
        kept = []

        def look(number, state):
            kept.append({} if state is None else residual(state))

        make = states.get(name, lambda m: None)
        found, _ = applied(lambda m: (make(m), subject), grads, wrapper=wrapper, between=look)
        return [[bool(g.isfinite().all()) for g in step] for step in found], found, kept

    everyone = world.run(step, world_size=3)
    for finite, found, kept in everyone:
        assert finite == [[False] * 3, [True] * 3], "the second step is clean: nothing bad was kept"
        assert not any(held.any() for held in kept[0].values()), "the residual from before the step stays"
        assert all(held.isfinite().all() for held in kept[1].values())
        assert all(torch.equal(a, b) for a, b in zip(found[1], everyone[0][1][1], strict=True))


# ways to wrap


@pytest.mark.world_size(2)
@wrappers
@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "static_graph"])
@pytest.mark.parametrize("make", [quarter, rank_one], ids=["top_k", "power_sgd"])
def test_options_of_ddp_and_accumulation_change_nothing(make, option, rank, wrapper):
    """The hook gets the sum of two micro-batches without synchronisation and one with it."""

    def weights(**more):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        ddp = wrapper(model, bucket_cap_mb=64 / 2**20, **more)
        ddp.register_comm_hook(*make(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(rank)
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(2 if step and option != "static_graph" else 0):
                with ddp.no_sync():
                    ddp(torch.randn(2, 4, dtype=torch.float64)).square().mean().backward()
            ddp(torch.randn(2, 4, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    assert torch.allclose(weights(), weights(**{option: True}), rtol=1e-10, atol=1e-12)


@pytest.mark.world_size(2)
@wrappers
@pytest.mark.parametrize("make", [quarter, rank_one], ids=["top_k", "power_sgd"])
def test_a_rank_that_has_no_more_inputs_joins(make, rank, wrapper):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    ddp = wrapper(model, bucket_cap_mb=64 / 2**20)
    state, hook = make(ddp)  # the wrapper's parameters have the same names
    ddp.register_comm_hook(state, hook)
    with ddp.join():
        for _ in range(3 + rank):
            ddp(torch.randn(2, 4)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(not name.startswith("module.") for name in residual(state))


@pytest.mark.world_size(2)
@wrappers
@pytest.mark.parametrize("hook", [fp16_compress, allreduce_hook, fp16_compress_hook], ids=["fp16", "torchs", "theirs"])
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_complex_gradients_travel_as_pairs_of_real_numbers(rank, wrapper, hook, as_view):
    model = nn.Linear(2, 1, bias=False, dtype=torch.complex64)
    ddp = wrapper(model, gradient_as_bucket_view=as_view)
    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        ddp(torch.full((1, 2), rank + 1j)).real.sum().backward()
        assert model.weight.grad.tolist() == [[0.5 - 1j] * 2]  # the conjugate of the mean input
    for make in (TopKState, PowerSGDState):
        with pytest.raises(TypeError, match=rf"{make.__name__} compresses real .*, 'weight' is torch\.complex64"):
            make(model)


class OneBucket:
    """A bucket of another data parallel implementation."""

    def __init__(self, buffer) -> None:
        self.vector = buffer

    def buffer(self):
        return self.vector


@pytest.mark.world_size(2)
def test_a_bucket_of_another_data_parallel(rank):
    found = fp16_compress(None, OneBucket(torch.tensor([rank + 1.0]))).wait()
    assert found.tolist() == [1.5]
    with pytest.raises(TypeError, match=r"fp16_compress rounds real floating point gradients, got torch\.complex64"):
        fp16_compress(None, OneBucket(torch.ones(1, dtype=torch.complex64)))


# bytes on the wire


def test_hooks_send_what_their_docstrings_say():
    """The bytes are those that a rank sends in one step for a 64 x 64 float32 gradient, with two ranks."""
    from pdlcheck.worlds import get_world

    def step(make, steps):
        applied(make, drawn(2, steps, [(64, 64)], dtype=torch.float32), dtype=torch.float32)

    def sent(make):
        """Return the bytes of one step: three steps minus two, because DDP rebuilds its buckets in the second step."""
        world = get_world("sim")
        found = []
        for steps in (2, 3):
            world.run(step, make, steps, world_size=2)
            found.append(world.traffic.sent_bytes(rank=0))
        return found[1] - found[0]

    def whole(module):
        return None, allreduce_hook

    numel = 64 * 64
    plain = sent(whole)
    assert sent(lambda m: (None, fp16_compress)) == plain / 2
    assert sent(lambda m: (PowerSGDState(m, rank=2, start_step=0), power_sgd)) == plain * 2 * (64 + 64) / numel
    chosen = 41  # of 4096, rounded up
    assert sent(lambda m: (TopKState(m, ratio=0.01), top_k)) == -(-chosen * 8 // 16) * 16
