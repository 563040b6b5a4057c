"""Half precision over ranks: all ranks step or none, and small contributions and small steps are not lost."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pdlcheck.checks import check_grad_scaler, check_low_precision_sum, check_replicas_in_sync, check_same_trajectory
from pdlcheck.primitives import ConvNet, LeNet, MasterWeights, sync_gradients

few = settings(max_examples=8)
LOW = [torch.float16, torch.bfloat16]


@st.composite
def overflows(draw, ranks):
    """Draw the ranks that overflow in each of up to six steps: at least one step has some, and one has none."""
    some = st.lists(st.sampled_from(ranks), unique=True, max_size=2).map(sorted)
    return draw(st.lists(some, min_size=2, max_size=6).filter(lambda steps: any(steps) and not all(steps)))


@pytest.mark.verifies("DistributedGradScaler")
@few
@given(data=st.data(), interval=st.integers(1, 3), fused=st.booleans())
def test_if_the_gradients_of_one_rank_overflow_no_rank_steps(subject, world, data, interval, fused):
    world_size = data.draw(st.integers(1, 4))
    idle = data.draw(st.sampled_from([[], [world_size - 1]] if world_size > 1 else [[]]))
    check_grad_scaler(
        partial(subject, "cpu", init_scale=64.0, growth_interval=interval),
        world,
        overflows=data.draw(overflows([rank for rank in range(world_size) if rank not in idle])),
        world_size=world_size,
        idle=idle,
        optimizer=partial(torch.optim.SGD, fused=fused),
    )


def unscale_then_sync(scaler, optimizer, module):
    scaler.unscale_(optimizer)
    sync_gradients(module)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.verifies("DistributedGradScaler")
@few
@given(data=st.data(), world_size=st.integers(2, 4), before=st.booleans())
def test_the_scaler_works_with_gradients_synchronised_before_or_after_unscaling(
    subject, world, data, world_size, before
):
    make = partial(subject, "cpu", init_scale=64.0, growth_interval=2)
    steps = data.draw(overflows(range(world_size)))
    if before:
        check_grad_scaler(make, world, overflows=steps, world_size=world_size, sync=sync_gradients)
    else:
        check_grad_scaler(make, world, overflows=steps, world_size=world_size, step=unscale_then_sync, replicated=True)


def test_the_scaler_of_torch_does_where_gradients_are_synchronised_before_it_looks(world):
    make = partial(torch.amp.GradScaler, "cpu", init_scale=64.0, growth_interval=2)
    check_grad_scaler(make, world, overflows=[[], [1], [], [], [0]], sync=sync_gradients)


@pytest.mark.verifies("DistributedGradScaler")
@few
@given(data=st.data(), world_size=st.integers(2, 4), sharded=st.booleans())
def test_scaled_steps_are_clipped_as_those_of_one_process(subject, world, data, world_size, sharded):
    max_norm = 10.0 * world_size

    def clipped(scaler, optimizer, module):
        scaler.clip_grad_norm_(optimizer, max_norm, sharded=sharded)
        scaler.step(optimizer)
        scaler.update()

    check_grad_scaler(
        partial(subject, "cpu", init_scale=64.0, growth_interval=2),
        world,
        overflows=[*data.draw(overflows(range(world_size))), [], [], []],
        world_size=world_size,
        sync=None if sharded else sync_gradients,
        step=clipped,
        max_norm=max_norm,
    )


@pytest.mark.verifies("DistributedGradScaler")
def test_the_scaler_clips_what_it_has_unscaled_and_skips_together(subject, world):
    """Clipping before unscaling would clip the scaled gradient, whose norm is 64 times larger."""

    def clipped(scaler, optimizer, module):
        norm = scaler.clip_grad_norm_(optimizer, 1e6, sharded=True, error_if_nonfinite=True)
        assert norm == math.inf or norm < 1e3  # unscaled; at most 2 * 3 * 12 * sqrt(3), computed by hand
        scaler.step(optimizer)
        scaler.update()

    make = partial(subject, "cpu", init_scale=2.0**20, growth_interval=2)
    check_grad_scaler(make, world, overflows=[[], [1], [], [], [0]], step=clipped)


def ddp_step(scaler, model, inputs, max_norm=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(i):
        optimizer.zero_grad()
        scaler.scale(model(inputs(i)).square().mean()).backward()
        sync_gradients(model)
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.verifies("DistributedGradScaler")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_replicas_stay_in_sync_under_autocast_with_clipping(subject, world, dtype):
    def start():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        scaler = subject("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
        torch.manual_seed(dist.get_rank() + 1)
        step = ddp_step(scaler, model, lambda i: torch.randn(4, 3), max_norm=0.05)

        def under_autocast(i):
            with torch.autocast("cpu", dtype):
                step(i)

        return model, under_autocast

    check_replicas_in_sync(start, world, world_size=3, steps=3)


@pytest.mark.verifies("DistributedGradScaler")
def test_scaled_and_clipped_steps_are_those_of_one_process(subject, world):
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 4, 2)

    def scaled(model, steps):
        step = ddp_step(subject("cpu", init_scale=2.0**16), model, lambda i: inputs[i].chunk(2)[dist.get_rank()], 0.1)
        for i in range(steps):
            step(i)

    def plain(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for i in range(steps):
            optimizer.zero_grad()
            model(inputs[i]).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    check_same_trajectory(scaled, plain, lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh()), world, steps=3)


@pytest.mark.verifies("DistributedGradScaler")
def test_a_loaded_scaler_goes_on_as_the_saved_one(subject, world):
    def scales(save_at):
        scaler = subject("cpu", init_scale=16.0, growth_interval=3)
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        seen = []
        for step in range(8):
            if step == save_at:
                state = copy.deepcopy(scaler.state_dict())
                assert {type(value) for value in state.values()} <= {int, float}
                scaler = subject("cpu", init_scale=2.0, growth_interval=3)
                scaler.load_state_dict(state)
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            if step == 4 and dist.get_rank() == 0:
                weight.grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        return seen

    straight = world.run(scales, None, world_size=2)
    assert straight == [[16.0, 16.0, 32.0, 32.0, 16.0, 16.0, 16.0, 32.0]] * 2
    assert [world.run(scales, at, world_size=2) for at in (1, 2, 5, 7)] == [straight] * 4


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("DistributedGradScaler")
@pytest.mark.world_size(2)
def test_scales_that_differ_are_refused_on_every_rank(subject, rank):
    scaler = subject("cpu", init_scale=4.0 * (1 + rank))
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    scaler.scale(weight.sum())
    with pytest.raises(ValueError, match="needs the same scale on every rank, got rank 0: 4, rank 1: 8; make it with"):
        scaler.unscale_(torch.optim.SGD([weight], lr=0.1))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("DistributedGradScaler")
@pytest.mark.world_size(3)
def test_gradients_that_one_rank_cannot_unscale_are_refused_on_every_rank(subject, rank):
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16 if rank == 1 else torch.float32))
    weight.grad = torch.ones_like(weight)
    message = r"^DistributedGradScaler.unscale_: Attempting to unscale FP16 gradients. \(on rank 1\)$"
    with pytest.raises(ValueError, match=message):
        subject("cpu", init_scale=4.0).step(torch.optim.SGD([weight], lr=0.1))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("DistributedGradScaler")
@pytest.mark.world_size(2)
def test_gradients_are_unscaled_once(subject):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = subject("cpu", init_scale=4.0)
    with pytest.raises(ValueError, match=r"no rank has scaled a loss; call scaler.scale\(loss\).backward\(\)"):
        scaler.step(optimizer)
    scaler = subject("cpu", init_scale=4.0)
    scaler.scale(weight.sum() * 2).backward()
    assert weight.grad.item() == 8.0
    scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 100.0).item() == 2.0
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        scaler.step(optimizer)
    scaler.update()
    assert weight.item() == -1.0


@pytest.mark.if_subject_takes("group")
@pytest.mark.verifies("DistributedGradScaler")
def test_a_scaler_agrees_in_its_group_alone(subject, world):
    def train():
        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = subject("cpu", init_scale=4.0, group=groups[dist.get_rank() % 2])
        scaler.scale(weight.sum()).backward()
        if dist.get_rank() == 2:
            weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        return weight.item(), scaler.get_scale()

    assert world.run(train, world_size=3) == [(1.0, 2.0), (0.0, 4.0), (1.0, 2.0)]


@pytest.mark.verifies("DistributedGradScaler")
@pytest.mark.world_size(2)
def test_two_optimizers_are_skipped_each_by_its_own_gradients_and_share_the_scale(subject, rank):
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([{"params": []}, {"params": [weight]}], lr=1.0) for weight in weights]
    scaler = subject("cpu", init_scale=4.0)
    scaler.scale(weights[0].sum() + weights[1].sum()).backward()
    if rank == 1:
        weights[0].grad.fill_(math.nan)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [weight.item() for weight in weights] == [1.0, 0.0]
    assert scaler.get_scale() == 2.0


@pytest.mark.verifies("DistributedGradScaler")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("clip", [False, True])
def test_a_rank_without_parameters_takes_part_like_the_others(subject, rank, clip):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [] if rank else [weight]}], lr=1.0)
    scaler = subject("cpu", init_scale=4.0)
    for factor, scale, end in ((1.0, 4.0, 0.0), (math.inf, 2.0, 0.0)):
        if not rank:
            optimizer.zero_grad()
            scaler.scale(weight.sum() * factor).backward()
        if clip:
            assert scaler.clip_grad_norm_(optimizer, 8.0, sharded=True).item() == factor
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale(), weight.item()) == (scale, 1.0 if rank else end)


@pytest.mark.verifies("DistributedGradScaler")
def test_a_disabled_scaler_sends_nothing(subject):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = subject("cpu", enabled=False)  # outside any process group
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.0


@pytest.mark.beyond_contract("low precision that is summed in float32")
@pytest.mark.verifies("sync_gradients")
@few
@given(data=st.data(), dtype=st.sampled_from(LOW), world_size=st.integers(2, 5))
def test_gradients_in_half_precision_are_added_in_float32(subject, world, data, dtype, world_size):
    """Small contributions beside a large one are not lost, and the sum may exceed the range of half precision."""
    largest = torch.finfo(dtype).max / (1 if dtype == torch.float16 else 16)  # float32 has the range of bfloat16
    values = st.sampled_from([1.0, 3.0, 1 / 128, 256.0, largest, largest / 2])
    drawn = [data.draw(st.lists(values, min_size=3, max_size=3)) for _ in range(world_size)]
    check_low_precision_sum(subject, [torch.tensor(one, dtype=dtype) for one in drawn], world)


@pytest.mark.verifies("MasterWeights")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_replicas_with_master_weights_add_up_steps_that_the_model_cannot_hold(subject, world, dtype):
    def train(steps):
        model = nn.Linear(1, 1, bias=False).to(dtype)
        nn.init.ones_(model.weight)
        masters = subject(model)
        optimizer = torch.optim.SGD(masters.parameters(), lr=1e-4)
        seen = []
        for _ in range(steps):
            model.weight.grad = torch.full_like(model.weight, 1.0 + dist.get_rank())
            masters.take_gradients()
            assert model.weight.grad is None
            sync_gradients(masters.parameters())
            optimizer.step()
            masters.write_back()
            seen.append(model.weight.item())
        return seen, masters.state_dict()["masters"][0].item()

    (seen, master), other = world.run(train, 200, world_size=2)
    assert (seen, master) == other
    assert seen[0] == 1.0  # the first step alone is too small for the model's dtype
    assert master == pytest.approx(1 - 200 * 1.5e-4, rel=1e-5)
    assert seen[-1] == torch.tensor(master).to(dtype).item()


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("MasterWeights")
def test_masters_resume_exactly_and_refuse_another_model(subject):
    model = nn.Linear(2, 1).bfloat16()
    masters = subject(model)
    with torch.no_grad():
        masters.parameters()[0].add_(1e-5)
    other = nn.Linear(2, 1).bfloat16()
    again = subject(other)
    again.load_state_dict(masters.state_dict())
    assert torch.equal(other.weight, model.weight)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), masters.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"MasterWeights has shapes \[\(3, 2\), \(3,\)\], the state has \[\(1, 2\), "):
        subject(nn.Linear(2, 3).bfloat16()).load_state_dict(masters.state_dict())
    with pytest.raises(ValueError, match="MasterWeights got an empty model"):
        subject(nn.ReLU())
    with pytest.raises(ValueError, match="MasterWeights got a state without 'masters'"):
        again.load_state_dict({})
    assert [tuple(master.shape) for master in subject(model.weight).parameters()] == [(1, 2)]
    with pytest.raises(TypeError, match="MasterWeights takes a module or tensors, got dict; of groups"):
        subject([{"params": model.parameters()}])


@pytest.mark.verifies("MasterWeights")
def test_weights_of_full_precision_are_their_own_masters(subject):
    model = nn.ModuleDict({"low": nn.Linear(1, 1).half(), "wide": nn.Linear(1, 1), "frozen": nn.Linear(1, 1)})
    model["frozen"].requires_grad_(False)
    masters = subject(model).parameters()
    assert [p.dtype for p in masters] == [torch.float32] * 4
    assert masters[2] is model["wide"].weight
    assert masters[0] is not model["low"].weight


LEVELS = {"O1-float16": torch.float16, "O1-bfloat16": torch.bfloat16, "O2": torch.float16}


@pytest.mark.verifies("DistributedGradScaler")
@pytest.mark.parametrize("level", LEVELS)
def test_the_opt_levels_train_as_float32_does(subject, world, level):
    """The docstring of the scaler claims it; half precision changes the loss slightly, but equally on all replicas."""
    dtype = LEVELS[level]

    def train(mixed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        inputs = torch.rand(64, 2) * 2 - 1
        targets = (2 * inputs[:, :1]).sin() + inputs[:, 1:]
        pure = mixed and level == "O2"
        masters = MasterWeights(model.half() if pure else model)
        optimizer = torch.optim.SGD(masters.parameters(), lr=0.1, momentum=0.9)
        scaler = subject("cpu", init_scale=2.0**8, growth_interval=20, enabled=mixed and dtype == torch.float16)
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        for _ in range(60):
            model.zero_grad()
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=mixed and not pure):
                found = model(inputs[mine].half() if pure else inputs[mine])
                loss = (found.float() - targets[mine]).square().mean()
            scaler.scale(loss).backward()
            masters.take_gradients()
            sync_gradients(masters.parameters())
            scaler.clip_grad_norm_(optimizer, max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
            masters.write_back()
        with torch.no_grad():
            loss = (model.float()(inputs) - targets).square().mean().item()
        return loss, [p.tolist() for p in masters.parameters()], scaler.get_scale()

    (loss, weights, scale), other = world.run(train, True, world_size=2)
    assert (loss, weights, scale) == other
    reference = world.run(train, False, world_size=2)[0][0]
    assert loss == pytest.approx(reference, rel=0.25)
    assert loss < 0.05
    assert scale == (1.0 if dtype != torch.float16 else 2.0**11)  # it grew three times in sixty steps


@pytest.mark.verifies("saved_activation_bytes")
@pytest.mark.parametrize("net", [LeNet, ConvNet])
def test_autocast_about_halves_the_activations_that_are_kept(subject, net):
    model, images = net(), torch.rand(256, 1, 8, 8)

    def kept(enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return subject(model, lambda: model(images))

    full, half = kept(False), kept(True)
    print(f"{net.__name__}: {full} bytes in float32, {half} under autocast, {half / full:.2f} of them")
    assert 0.45 < half / full < 0.65  # without the images, softmax and indices of max pooling


@pytest.mark.verifies("saved_activation_bytes")
def test_pieces_of_one_memory_are_all_kept(subject):
    x, layer = torch.ones(8, 4), nn.Linear(4, 30, bias=False)

    def gated():
        query, key, _ = layer(x).chunk(3, dim=-1)
        return query * key

    assert subject(layer, gated) == 4 * (8 * 4 + 8 * 20)
    rows = torch.ones(8, 4, requires_grad=True)
    assert subject(layer, lambda: rows[:4].square().sum() + rows[2:6].t().square().sum()) == 4 * 6 * 4
    chosen = torch.eye(4).to_sparse().requires_grad_()
    assert subject(layer, lambda: torch.sparse.mm(chosen, layer.weight.t())) == 4 * (2 * 8 + 4)


@pytest.mark.gpu
@pytest.mark.verifies("DistributedGradScaler")
@pytest.mark.world_size(1)
def test_the_scaler_on_a_gpu(subject, device):
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    for fused in (False, True):
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        scaler = subject("cuda", init_scale=4.0, growth_interval=1)
        for value, expected in ((math.inf, 2.0), (1.0, 4.0)):
            before = weight.detach().clone()
            optimizer.zero_grad()
            scaler.scale(weight.sum() * value).backward()
            assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(value * math.sqrt(2))
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == expected
            assert torch.equal(weight, before) == math.isinf(value)
