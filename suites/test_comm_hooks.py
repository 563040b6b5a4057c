"""Compressed gradients: replicas stay equal, what is not sent is kept, operations come in one order on all ranks."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_comm_hook, check_replicas_in_sync
from pdlcheck.primitives import PowerSGDState, TopKState, bf16_compress, fp16_compress, power_sgd, top_k

few = settings(max_examples=6)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MATRICES = [(4, 6), (5,), (6, 4)]
SEMANTICS = pytest.mark.parametrize("semantics", ["rendezvous", "gloo", "nccl"])


def residual(state):
    return state.residuals.state_dict()


def quarter(module):
    return TopKState(module, ratio=0.25), top_k


def rank_one(module):
    return PowerSGDState(module, start_step=0, min_compression=1.0), power_sgd


def rank_two_later(module):
    return PowerSGDState(module, rank=2, start_step=3, min_compression=1.0), power_sgd


class Given(nn.Module):
    """The gradient of each parameter is what forward is given; None leaves it out."""

    def __init__(self, shapes, dtype=torch.float64) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])

    def forward(self, *grads):
        parts = [(p * g).sum() for p, g in zip(self.weights, grads, strict=True) if g is not None]
        return torch.stack(parts).sum()


def applied(make_hook, grads, *, bucket_bytes=64, dtype=torch.float64, unused=False, between=None):
    """What this rank holds after each step, and the hook's state; ``grads[rank][step][parameter]``."""
    mine = grads[dist.get_rank()]
    everything = [step for rank in grads for step in rank]
    shapes = [next(g.shape for g in column if g is not None) for column in zip(*everything, strict=True)]
    model = Given(shapes, dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=unused)
    state, hook = make_hook(model)
    ddp.register_comm_hook(state, hook)
    found = []
    for number, step in enumerate(mine):
        model.zero_grad()
        ddp(*step).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.weights])
        if between:
            between(number, state)
    return found, state


def drawn(world_size, steps, shapes, *, seed=0, dtype=torch.float64):
    """Sixteenths: sums are exact."""
    draws = torch.Generator().manual_seed(seed)
    return [
        [[(torch.randn(s, generator=draws) * 16).round().to(dtype) / 16 for s in shapes] for _ in range(steps)]
        for _ in range(world_size)
    ]


def mean(grads, step, place):
    return sum(rank[step][place] for rank in grads) / len(grads)


# what every hook promises


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
@pytest.mark.parametrize("bucket_bytes", [1, 128, 10**6])
def test_power_sgd_meets_in_the_same_operations_whatever_completes_first(subject, world, bucket_bytes):
    def train():
        grads = drawn(3, 3, MATRICES)
        found, _ = applied(lambda m: (rank_one(m)[0], subject), grads, bucket_bytes=bucket_bytes)
        return torch.cat([g.flatten() for step in found for g in step])

    first, *others = world.run(train, world_size=3)
    assert all(torch.equal(first, other) for other in others)


@SEMANTICS
@pytest.mark.parametrize(
    "make", [lambda m: (None, fp16_compress), quarter, rank_one, rank_two_later], ids=["fp16", "top_k", "psgd", "later"]
)
def test_replicas_train_alike_under_every_hook(make, semantics):
    from pdlcheck.worlds import get_world

    def start():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        ddp = DistributedDataParallel(model, bucket_cap_mb=100 / 2**20)
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


@pytest.mark.verifies("fp16_compress")
def test_fp16_compress_takes_gradients_beyond_its_range_whose_mean_is_within(subject, world):
    def step():
        grads = [[[torch.tensor([value, 1.0])]] for value in (120_000.0, -60_000.0, 3.0)]
        return applied(lambda m: (None, subject), grads, dtype=torch.float32)[0][0][0].tolist()

    for found in world.run(step, world_size=3):
        assert found == pytest.approx([20_001, 1], rel=2**-9)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.verifies(name), id=name)
        for name in ("bf16_compress", "fp16_compress", "power_sgd", "top_k")
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_of_one_rank_reaches_all(name, subject, world, bad):
    states = {"top_k": lambda m: TopKState(m, ratio=0.25), "power_sgd": lambda m: rank_one(m)[0]}

    def step():
        grads = drawn(3, 2, MATRICES)
        for place in range(3):
            grads[1][0][place].view(-1)[2] = bad
        kept = []

        def look(number, state):
            kept.append({} if state is None else residual(state))

        found, _ = applied(lambda m: (states.get(name, lambda m: None)(m), subject), grads, between=look)
        return [[bool(g.isfinite().all()) for g in step] for step in found], found, kept

    everyone = world.run(step, world_size=3)
    for finite, found, kept in everyone:
        assert finite == [[False] * 3, [True] * 3], "the second step is clean: nothing bad was kept"
        assert not any(held.any() for held in kept[0].values()), "the residual from before the step stays"
        assert all(held.isfinite().all() for held in kept[1].values())
        assert all(torch.equal(a, b) for a, b in zip(found[1], everyone[0][1][1], strict=True))


# top-k


@pytest.mark.verifies("top_k")
@few
@given(
    world_size=st.sampled_from([1, 2, 4]),
    ratio=st.sampled_from([0.01, 0.3, 1.0]),
    steps=st.integers(1, 4),
    bucket_bytes=st.sampled_from([1, 100, 10**6]),
    seed=st.integers(0, 99),
)
def test_what_top_k_applied_and_what_it_keeps_are_the_gradients_exactly(
    subject, world, world_size, ratio, steps, bucket_bytes, seed
):
    shapes = [(3, 4), (), (7,), (0,), (2, 2, 2)]
    grads = drawn(world_size, steps, shapes, seed=seed)

    def train():
        found, state = applied(lambda m: (TopKState(m, ratio=ratio), subject), grads, bucket_bytes=bucket_bytes)
        return found, residual(state)

    everyone = world.run(train, world_size=world_size)
    for place in range(len(shapes)):
        applied_sum = sum(step[place] for step in everyone[0][0]) * world_size
        kept = sum(held[f"weights.{place}"] for _, held in everyone)
        assert torch.equal(applied_sum + kept, sum(step[place] for rank in grads for step in rank))


@pytest.mark.verifies("top_k")
def test_top_k_sends_the_largest_entries_of_each_parameter(subject, world):
    def step():
        grads = [[[torch.tensor([1.0, -8, 3, 2]), torch.tensor([0.5, 0.25])]], [[torch.tensor([4.0, 1, 1, 1])] * 2]]
        grads[1][0][1] = torch.tensor([0.25, 2.0])
        return applied(lambda m: (TopKState(m, ratio=0.25), subject), grads, dtype=torch.float32)[0][0]

    for first, other in world.run(step, world_size=2):
        assert first.tolist() == [2, -4, 0, 0] and other.tolist() == [0.25, 1]


@pytest.mark.verifies("top_k")
@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_the_buckets_do_not_matter_to_top_k(subject, world, ratio):
    grads = drawn(3, 4, MATRICES)

    def train():
        def make(module):
            return TopKState(module, ratio=ratio), subject

        return [applied(make, grads, bucket_bytes=nbytes)[0] for nbytes in (1, 200, 10**6)]

    one, two, three = world.run(train, world_size=3)[0]
    for step in range(4):
        for place in range(3):
            assert torch.equal(one[step][place], two[step][place]) and torch.equal(two[step][place], three[step][place])
            if ratio == 1:
                assert torch.equal(one[step][place], mean(grads, step, place))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.verifies(n), id=n) for n in ("power_sgd", "top_k")])
def test_a_parameter_that_nobody_uses_keeps_its_residual(name, subject, world):
    make = {"top_k": lambda m: (TopKState(m, ratio=0.1), subject), "power_sgd": lambda m: (rank_one(m)[0], subject)}

    def train():
        grads = drawn(2, 3, MATRICES)
        for rank in grads:
            rank[1][0] = None
        seen = []
        applied(make[name], grads, unused=True, between=lambda i, state: seen.append(residual(state)["weights.0"]))
        return seen

    for first, second, third in world.run(train, world_size=2):
        assert first.any() and torch.equal(first, second) and not torch.equal(second, third)


@pytest.mark.verifies("top_k")
@pytest.mark.world_size(2)
def test_without_error_feedback_nothing_is_kept(subject, world_size):
    grads = drawn(world_size, 2, MATRICES)
    _, state = applied(lambda m: (TopKState(m, ratio=0.1, error_feedback=False), subject), grads)
    assert residual(state) == {}


# PowerSGD


@pytest.mark.verifies("power_sgd")
def test_power_sgd_finds_a_mean_of_its_own_rank_exactly(subject, world):
    """The columns of every rank's matrix lie in one plane."""

    def train():
        draws = torch.Generator().manual_seed(0)
        plane = torch.randn(6, 2, generator=draws, dtype=torch.float64)
        grads = [[[plane @ torch.randn(2, 8, generator=draws, dtype=torch.float64)]] for _ in range(3)]
        state = {"rank": 2, "start_step": 0, "min_compression": 0.5}
        return applied(lambda m: (PowerSGDState(m, **state), subject), grads)[0][0][0], mean(grads, 0, 0)

    for found, expected in world.run(train, world_size=3):
        assert (found - expected).abs().max() <= 1e-13  # a dozen products of numbers below 10


@pytest.mark.verifies("power_sgd")
def test_warm_start_comes_to_the_best_approximation(subject, world):
    """The same gradient again and again, without error feedback, is power iteration: it ends at the first pair."""
    grads = [[rank[0]] * 60 for rank in drawn(2, 1, [(6, 8)])]

    def train():
        def make(warm):
            keywords = {"start_step": 0, "min_compression": 0.5, "warm_start": warm, "error_feedback": False}
            return lambda m: (PowerSGDState(m, **keywords), subject)

        return [[step[0] for step in applied(make(warm), grads)[0]] for warm in (True, False)]

    goal = mean(grads, 0, 0)
    left, values, right = torch.linalg.svd(goal)
    best = values[0] * left[:, :1] @ right[:1]
    warm, cold = world.run(train, world_size=2)[0]
    assert (warm[-1] - best).norm() <= 1e-6 * best.norm()
    assert (warm[0] - best).norm() > 1e-2 * best.norm()
    assert min((step - best).norm() for step in cold) > 1e-3 * best.norm()
    assert not torch.equal(cold[0], cold[1]), "other random factors at each step"


@pytest.mark.verifies("power_sgd")
@pytest.mark.world_size(2)
def test_power_sgd_is_the_mean_before_it_starts_and_of_what_it_does_not_compress(subject, world_size):
    grads = drawn(world_size, 3, MATRICES)
    found, state = applied(lambda m: (PowerSGDState(m, start_step=2, min_compression=1.0), subject), grads)
    assert state.step == 3
    for step in range(3):
        for place, shape in enumerate(MATRICES):
            plain = step < 2 or len(shape) == 1
            assert torch.equal(found[step][place], mean(grads, step, place)) == plain
    assert sorted(residual(state)) == ["weights.0", "weights.2"]


@pytest.mark.verifies("PowerSGDState")
def test_only_matrices_that_shrink_are_compressed(subject):
    model = nn.Linear(10, 10)
    assert subject(model, rank=2, min_compression=2).compresses(model.weight)  # 100 numbers, 40 with rank 2
    assert not subject(model, rank=2, min_compression=2.5).compresses(model.weight)
    assert not subject(model).compresses(model.bias)


@pytest.mark.verifies("power_sgd")
@pytest.mark.world_size(2)
def test_factors_depend_on_the_seed_only(subject, world_size):
    grads = drawn(world_size, 1, [(6, 8)])

    def first(seed):
        torch.manual_seed(dist.get_rank() + seed)  # the rank's own numbers are not used
        return applied(lambda m: (PowerSGDState(m, start_step=0, seed=seed), subject), grads)[0][0][0]

    same, again, other = first(0), first(0), first(1)
    assert torch.equal(same, again) and not torch.equal(same, other)


@pytest.mark.verifies("power_sgd")
@pytest.mark.world_size(2)
def test_a_step_of_zeros_does_not_spoil_the_next(subject, world_size):
    grads = drawn(world_size, 3, MATRICES)
    for rank in grads:
        rank[1] = [torch.zeros(shape, dtype=torch.float64) for shape in MATRICES]
    found, state = applied(lambda m: (rank_one(m)[0], subject), grads)
    assert not any(g.any() for g in found[1]) and all(g.any() for g in found[2])
    total = sum(step[0] for step in found)
    kept = residual(state)["weights.0"]
    dist.all_reduce(kept)
    expected = mean(grads, 0, 0) + mean(grads, 2, 0)
    assert (total + kept / world_size - expected).abs().max() <= 1e-14


# checkpoints


@pytest.mark.parametrize("make", [quarter, rank_one, rank_two_later], ids=["top_k", "rank 1", "rank 2 later"])
def test_a_restored_state_goes_on_bit_for_bit(make, world):
    grads = drawn(2, 6, MATRICES)

    def train():
        whole, _ = applied(make, grads)
        file = io.BytesIO()
        _, state = applied(make, [rank[:4] for rank in grads])
        torch.save(state.state_dict(), file)
        file.seek(0)

        def restored(module):
            new, hook = make(module)
            new.load_state_dict(torch.load(file, weights_only=True))
            return new, hook

        rest, _ = applied(restored, [rank[4:] for rank in grads])
        return whole[4:], rest

    for whole, rest in world.run(train, world_size=2):
        for a, b in zip(whole, rest, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("make", [TopKState, PowerSGDState], ids=["TopKState", "PowerSGDState"])
def test_a_state_of_another_rank_world_or_model_is_refused(make, rank):
    name = make.__name__
    model = nn.Linear(3, 2)
    state = make(model)
    saved = state.state_dict()
    for place in ({"rank": 1 - rank}, {"world_size": 3}):
        with pytest.raises(ValueError, match=rf"{name} got the state of rank \d of \d on rank {rank} of 2; a rank's"):
            state.load_state_dict(saved | place)
    with pytest.raises(ValueError, match=f"{name} got a saved residual of 'other', the model has no such parameter"):
        state.load_state_dict(saved | {"residuals": {"other": torch.zeros(1)}})
    with pytest.raises(ValueError, match=r"saved residual of shape \(3, 2\) for 'weight', whose shape is \(2, 3\)"):
        state.load_state_dict(saved | {"residuals": {"weight": torch.zeros(3, 2)}})
    if make is PowerSGDState:
        with pytest.raises(ValueError, match="PowerSGDState of rank=1 got a state of rank=2"):
            state.load_state_dict(make(model, rank=2).state_dict())
        with pytest.raises(ValueError, match="saved factors of 'other', the model has no such parameter"):
            state.load_state_dict(saved | {"factors": {"other": torch.zeros(1)}})


@pytest.mark.world_size(2)
@pytest.mark.parametrize("make", [TopKState, PowerSGDState], ids=["TopKState", "PowerSGDState"])
def test_residuals_follow_a_loss_scale(make, world_size):
    grads = drawn(world_size, 1, MATRICES)
    hook = top_k if make is TopKState else power_sgd
    keywords = {"ratio": 0.1} if make is TopKState else {"start_step": 0, "min_compression": 1.0}
    _, state = applied(lambda m: (make(m, **keywords), hook), grads)
    before = residual(state)
    state.scale_residuals(0.5)
    assert all(torch.equal(held * 0.5, residual(state)[name]) for name, held in before.items())


# ways to wrap


@pytest.mark.world_size(2)
@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "static_graph"])
@pytest.mark.parametrize("make", [quarter, rank_one], ids=["top_k", "power_sgd"])
def test_options_of_ddp_and_accumulation_change_nothing(make, option, rank):
    """Two micro-batches without synchronisation and one with: the hook gets their sum."""

    def weights(**more):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        ddp = DistributedDataParallel(model, bucket_cap_mb=64 / 2**20, **more)
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
@pytest.mark.parametrize("make", [quarter, rank_one], ids=["top_k", "power_sgd"])
def test_a_rank_that_has_no_more_inputs_joins(make, rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=64 / 2**20)
    state, hook = make(ddp)  # the wrapper's parameters have the same names
    ddp.register_comm_hook(state, hook)
    with ddp.join():
        for _ in range(3 + rank):
            ddp(torch.randn(2, 4)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(not name.startswith("module.") for name in residual(state))


# bad input


@pytest.mark.parametrize(
    ("make", "keywords", "error", "message"),
    [
        (TopKState, {"ratio": 0}, ValueError, "TopKState needs a ratio above 0 and at most 1, got ratio=0"),
        (TopKState, {"ratio": 1.5}, ValueError, r"at most 1, got ratio=1\.5"),
        (TopKState, {"ratio": True}, ValueError, "at most 1, got ratio=True"),
        (PowerSGDState, {"rank": 0}, ValueError, "PowerSGDState needs rank of at least 1, got rank=0"),
        (PowerSGDState, {"rank": 1.5}, TypeError, "PowerSGDState takes rank as an int, got float"),
        (PowerSGDState, {"start_step": -1}, ValueError, "needs start_step of at least 0, got start_step=-1"),
        (PowerSGDState, {"min_compression": 0}, ValueError, "needs a min_compression above 0, got 0"),
        (PowerSGDState, {"seed": -1}, ValueError, "needs seed of at least 0, got seed=-1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_refused(make, keywords, error, message):
    with pytest.raises(error, match=message):
        make(nn.Linear(1, 1), **keywords)


@pytest.mark.parametrize("make", [TopKState, PowerSGDState], ids=["TopKState", "PowerSGDState"])
def test_a_model_without_gradients_is_refused(make):
    with pytest.raises(ValueError, match=f"{make.__name__} got an empty model: no parameter requires a gradient"):
        make(nn.ReLU())
    with pytest.raises(TypeError, match=rf"{make.__name__} takes the torch\.nn\.Module that is wrapped, got list"):
        make([nn.Parameter(torch.ones(1))])


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("hook", "state", "message"),
    [
        (fp16_compress, 3, "fp16_compress takes a process group or None as its state, got int"),
        (bf16_compress, "gloo", "bf16_compress takes a process group or None as its state, got str"),
        (top_k, None, "top_k takes a TopKState as its state, got NoneType"),
        (power_sgd, None, "power_sgd takes a PowerSGDState as its state, got NoneType"),
    ],
    ids=["fp16", "bf16", "top_k", "power_sgd"],
)
def test_a_wrong_state_is_refused_on_every_rank(hook, state, message):
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    ddp.register_comm_hook(state, hook)
    with pytest.raises(TypeError, match=message):
        ddp(torch.ones(1, 2)).sum().backward()


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("make", "hook"), [(TopKState, top_k), (PowerSGDState, power_sgd)], ids=["TopKState", "PowerSGDState"]
)
def test_the_state_of_another_model_is_refused_on_every_rank(make, hook):
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    ddp.register_comm_hook(make(nn.Linear(2, 1)), hook)
    with pytest.raises(ValueError, match=rf"{make.__name__} does not know a parameter of shape .* that was wrapped"):
        ddp(torch.ones(1, 2)).sum().backward()


@pytest.mark.world_size(2)
def test_complex_gradients_of_torchs_buckets_travel_as_pairs_of_real_numbers(rank):
    model = nn.Linear(2, 1, bias=False, dtype=torch.complex64)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fp16_compress)
    ddp(torch.full((1, 2), rank + 1j)).real.sum().backward()
    assert model.weight.grad.tolist() == [[0.5 - 1j] * 2]  # the conjugate of the mean input
    for make in (TopKState, PowerSGDState):
        with pytest.raises(TypeError, match=rf"{make.__name__} compresses real .*, 'weight' is torch\.complex64"):
            make(model)


class OneBucket:
    """A bucket of somebody else's data parallel."""

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


# what travels


def test_hooks_send_what_their_docstrings_say():
    """Bytes that a rank sends in one step for the gradient of a 64 x 64 float32 matrix, with two ranks."""
    from pdlcheck.worlds import get_world

    def step(make, steps):
        applied(make, drawn(2, steps, [(64, 64)], dtype=torch.float32), dtype=torch.float32)

    def sent(make):
        """Of one step: three steps less two, in the second of which DDP makes its buckets anew."""
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
