"""A pipeline of stages takes the steps of one process; PipeDream takes those of its own rule."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pdlcheck.checks import check_pipedream, check_pipeline, check_same_gradients, check_schedule
from pdlcheck.primitives.pipeline import gpipe, lay_out, one_f_one_b, parse_schedule, pipedream
from pdlcheck.primitives.pipeline.cells import Cell

pytestmark = pytest.mark.verifies("Pipeline")
few = settings(max_examples=6)
MSE, SUM = nn.MSELoss(), nn.MSELoss(reduction="sum")
SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def tanh_net(layers=4, width=3):
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())))


def samples(count, width=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, width, generator=generator) for _ in range(2))


def rank_of(group=None):
    return dist.get_rank(group), dist.get_world_size(group) - 1


def starter(subject, loss, **keywords):
    """A start for the checks; ranks that need no inputs or targets get none."""

    def start(model):
        pipeline = subject(model, loss, **keywords)
        rank, last = rank_of(keywords.get("group"))

        def step(inputs, targets):
            result = pipeline.step(inputs if rank == 0 else None, targets if rank == last else None)
            return result.loss, result.outputs

        return pipeline.module, step

    start.__name__ = subject.__name__
    return start


# gradients, outputs, losses


@few
@given(data=st.data(), schedule=st.sampled_from(["1f1b", "gpipe"]), loss=st.sampled_from([MSE, SUM]))
def test_a_pipeline_takes_the_steps_of_one_process(subject, world, data, schedule, loss):
    n_stages = data.draw(st.integers(1, 4))
    n_microbatches = data.draw(st.integers(1, 6))
    layers = data.draw(st.integers(n_stages, 5))
    sizes = data.draw(st.lists(st.integers(n_microbatches, 11), min_size=2, max_size=3))
    start = starter(
        subject,
        loss,
        schedule=schedule,
        n_microbatches=n_microbatches,
        recompute=data.draw(st.booleans()),
        split=data.draw(st.sampled_from(["parameters", sorted(2 * i for i in range(1, n_stages))])),
    )
    check_pipeline(
        start,
        partial(tanh_net, layers),
        loss,
        [samples(size, seed=i) for i, size in enumerate(sizes)],
        world,
        world_size=n_stages,
        n_microbatches=n_microbatches,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    )


@few
@given(n_ranks=st.integers(1, 3), rounds=st.integers(1, 3), stages_per_rank=st.integers(1, 3), more=st.integers(0, 4))
def test_interleaved_stages_take_the_steps_of_one_process(subject, world, n_ranks, rounds, stages_per_rank, more):
    start = starter(
        subject, MSE, schedule="interleaved", n_microbatches=n_ranks * rounds, stages_per_rank=stages_per_rank
    )
    batches = [samples(n_ranks * rounds + more, seed=seed) for seed in range(2)]
    check_pipeline(
        start,
        partial(tanh_net, n_ranks * stages_per_rank),
        MSE,
        batches,
        world,
        world_size=n_ranks,
        n_microbatches=n_ranks * rounds,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize("semantics", ["rendezvous", "buffered", "gloo", "nccl"])
def test_no_semantics_of_messages_lets_a_pipeline_wait_for_ever(subject, schedule, semantics):
    from pdlcheck.worlds import get_world

    start = starter(subject, MSE, schedule=schedule, n_microbatches=4)
    sim = get_world("sim", semantics=semantics)
    check_pipeline(start, tanh_net, MSE, [samples(9)], sim, world_size=2, n_microbatches=4)


@pytest.mark.parametrize("schedule", ["random:1", "random:2", "pct:3,3,400"])
def test_ranks_may_come_in_any_order(subject, schedule):
    from pdlcheck.worlds import get_world

    start = starter(subject, MSE, schedule="1f1b", n_microbatches=5)
    sim = get_world("sim", schedule=schedule, semantics="nccl")
    check_pipeline(start, tanh_net, MSE, [samples(9), samples(5)], sim, world_size=4, n_microbatches=5)


@pytest.mark.parametrize("schedule", ["first", "random:1", "pct:2,3,400"])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
def test_receives_may_be_posted_before_the_pass_where_directions_are_apart(subject, schedule, kind):
    """As on gloo and MPI; under sends that wait for their receives."""
    from pdlcheck.worlds import get_world

    def start(model):
        pipeline = subject(model, MSE, schedule=kind, n_microbatches=4)
        pipeline._messages.ahead = True

        def step(inputs, targets):
            result = pipeline.step(inputs, targets)
            return result.loss, result.outputs

        return pipeline.module, step

    sim = get_world("sim", schedule=schedule)
    check_pipeline(start, tanh_net, MSE, [samples(9)] * 2, sim, world_size=2, n_microbatches=4)


class Branches(nn.Module):
    """From one tensor to three, one of them of integers that the next stages only pass on."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x):
        return self.one(x), self.two(x).tanh(), (x[:, 0] > 0).long()


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, parts):
        wide, narrow, kind = parts
        return self.layer(wide), narrow, kind


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Embedding(2, 2)

    def forward(self, parts):
        wide, narrow, kind = parts
        return (wide + narrow) * self.scale(kind)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_several_tensors_and_integers_go_from_stage_to_stage(subject, world, recompute):
    start = starter(subject, MSE, n_microbatches=3, split="layers", recompute=recompute)
    x, y = samples(7)
    check_pipeline(
        start,
        lambda: nn.Sequential(Branches(), Middle(), Join()),
        MSE,
        [(x, y[:, :2])] * 2,
        world,
        world_size=3,
        n_microbatches=3,
    )


class Turned(nn.Module):
    """Returns a view with other strides, whose gradient comes back with other strides too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x).t().contiguous().t()


def test_activations_may_have_any_strides(subject, world):
    start = starter(subject, MSE, n_microbatches=2, split="layers")
    make = lambda: nn.Sequential(Turned(), Turned())  # noqa: E731
    check_pipeline(start, make, MSE, [samples(6)], world, world_size=2, n_microbatches=2)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 3)

    def forward(self, given):
        x, words = given
        return self.words(words) + x


def test_inputs_may_be_several_and_integers(subject, world):
    x, y = samples(6)
    batch = ((x, torch.tensor([0, 4, 2, 2, 1, 0])), y)
    start = starter(subject, MSE, n_microbatches=4)
    make = lambda: nn.Sequential(TwoInputs(), nn.Tanh(), nn.Linear(3, 3))  # noqa: E731
    check_pipeline(start, make, MSE, [batch], world, world_size=2, n_microbatches=4)


class Unused(nn.Module):
    """Does not use its input: the stage before gets a gradient of zeros."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.weight.expand(len(x), 3) * 2


def test_a_stage_that_does_not_use_its_input_sends_zeros_back(subject, world):
    start = starter(subject, MSE, n_microbatches=2, split="layers")
    check_pipeline(
        start,
        lambda: nn.Sequential(nn.Linear(3, 3), Unused()),
        MSE,
        [samples(4)],
        world,
        world_size=2,
        n_microbatches=2,
    )


def test_a_stage_may_begin_in_place_and_be_frozen(subject, world):
    def make():
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3), nn.Linear(3, 3))
        model[0].requires_grad_(False)
        return model

    start = starter(subject, MSE, n_microbatches=2, split=[1, 3])
    check_pipeline(start, make, MSE, [samples(5)] * 2, world, world_size=3, n_microbatches=2)


def ignoring_loss(out, labels):
    return nn.functional.cross_entropy(out, labels, ignore_index=-1)


def test_a_mean_over_some_of_the_targets_is_weighted_with_their_number(subject, world):
    x, _ = samples(8)
    labels = torch.tensor([0, -1, -1, -1, 2, 1, 0, -1])
    start = starter(subject, ignoring_loss, n_microbatches=4, loss_weight=lambda part: (part >= 0).sum().item())
    # the second micro-batch has no target that counts, so that its own mean is no number
    check_pipeline(start, tanh_net, ignoring_loss, [(x, labels)] * 2, world, world_size=2, n_microbatches=4)


def test_gradients_accumulate_over_steps(subject, world):
    """Also of tied parameters, whose parts of this step alone are added over the stages."""

    def accumulate():
        torch.manual_seed(0)
        pipeline = subject(tied_net().double(), MSE, n_microbatches=2)
        x, y = (t.double() for t in samples(4))
        pipeline.step(x, y)
        once = {name: p.grad.clone() for name, p in pipeline.module.named_parameters()}
        pipeline.step(x, y)
        return max(float((p.grad - 2 * once[name]).abs().max()) for name, p in pipeline.module.named_parameters())

    assert max(world.run(accumulate, world_size=2)) < 1e-14


# tied parameters, data parallel


def tied_net():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[4].weight = model[0].weight
    return model


@pytest.mark.parametrize(("schedule", "world_size"), [("1f1b", 2), ("1f1b", 3), ("gpipe", 3), ("interleaved", 2)])
def test_tied_copies_get_the_sum_of_their_gradients_and_stay_equal(subject, world, schedule, world_size):
    def make():
        if schedule != "interleaved":
            return tied_net()
        model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(6)))
        for position in (2, 5):  # on both ranks, and twice on the first
            model[position].weight = model[0].weight
        return model

    keywords = {"split": [1, 2, 3]} if schedule == "interleaved" else {}
    start = starter(subject, SUM, schedule=schedule, n_microbatches=4, **keywords)
    batches = [samples(5, seed=seed) for seed in range(3)]
    lr = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    check_pipeline(start, make, SUM, batches, world, world_size=world_size, n_microbatches=4, optimizer=lr)


def test_tied_copies_start_alike_when_ranks_draw_their_own_weights(subject, world):
    def first_weights():
        torch.manual_seed(dist.get_rank())
        return subject(tied_net(), MSE, n_microbatches=1).module

    first, second = world.run(first_weights, world_size=2)
    assert torch.equal(dict(first.named_parameters())["0.weight"], dict(second.named_parameters())["4.weight"])


@pytest.mark.parametrize("loss", [MSE, SUM], ids=["mean", "sum"])
@pytest.mark.parametrize("make", [tanh_net, tied_net], ids=["plain", "tied"])
def test_two_pipelines_on_uneven_halves_of_the_batch_are_one(subject, world, loss, make):
    """2 x 2: ranks 0 and 1 are one pipeline, 2 and 3 the other; stages meet in sub-groups."""

    def start(model):
        rank = dist.get_rank()
        pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        stages = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        if rank > 1:
            for parameter in model.parameters():
                nn.init.zeros_(parameter)  # weights come from the first pipeline
        pipeline = subject(model, loss, n_microbatches=2, group=pipelines[rank // 2], data_group=stages[rank % 2])

        def step(inputs, targets):
            half = slice(0, 3) if rank < 2 else slice(3, None)
            pipeline.step(inputs[half], targets[half])

        return pipeline.module, step

    batches = [samples(8, seed=seed) for seed in range(2)]
    lr = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    check_pipeline(start, make, loss, batches, world, world_size=4, n_microbatches=2, results=False, optimizer=lr)


# recomputation


def dropout_net():
    return nn.Sequential(
        nn.Linear(3, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_recomputed_dropout_is_the_dropout_of_the_forward_pass(subject, world, schedule):
    plain = starter(subject, MSE, schedule=schedule, n_microbatches=3)
    recomputing = starter(subject, MSE, schedule=schedule, n_microbatches=3, recompute=True)
    check_same_gradients(recomputing, plain, dropout_net, [samples(9), samples(7)], world, world_size=2)


def test_recomputation_keeps_inputs_instead_of_activations(subject):
    kept = []

    class Watched(nn.Module):
        def forward(self, x):
            y = x * 2
            kept.append(weakref.ref(y))
            return y.tanh() * y

    def alive(recompute):
        kept.clear()
        model = nn.Sequential(nn.Linear(3, 3), Watched(), nn.Linear(3, 3))
        pipeline = subject(model, MSE, devices=["cpu"], schedule="gpipe", n_microbatches=4, recompute=recompute)
        at_the_loss = []
        pipeline._built.stages[0].loss = lambda out, y: (
            at_the_loss.append(sum(r() is not None for r in kept)),
            MSE(out, y),
        )[1]
        pipeline.step(*samples(4))
        return max(at_the_loss)

    assert alive(recompute=False) >= 4
    assert alive(recompute=True) <= 1


# live activations


class Counter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append(1)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append(-1)
        return grad, None


class Counting(nn.Module):
    """Counts forward passes that wait for their backward pass."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.events = []

    def forward(self, x):
        return Counter.apply(x * self.weight, self.events)


@pytest.mark.parametrize("n_microbatches", [2, 6])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream"])
def test_live_activations_are_those_of_the_schedule(subject, world, schedule, n_microbatches):
    n_stages = 3

    def peak():
        layers = [Counting() for _ in range(n_stages)]
        keywords = {"optimizer": SGD} if schedule == "pipedream" else {}
        pipeline = subject(nn.Sequential(*layers), MSE, schedule=schedule, n_microbatches=n_microbatches, **keywords)
        own = layers[dist.get_rank()].events
        pipeline.step(*samples(6))
        own.clear()
        pipeline.step(*samples(6))
        return max(sum(own[:end]) for end in range(len(own) + 1))

    for rank, found in enumerate(world.run(peak, world_size=n_stages)):
        assert found == (n_microbatches if schedule == "gpipe" else min(n_stages - rank, n_microbatches))


# PipeDream


@few
@given(
    n_stages=st.integers(2, 4),
    more=st.integers(2, 5),
    vertical_sync=st.booleans(),
    recompute=st.booleans(),
    optimizer=st.sampled_from([SGD, MOMENTUM, partial(torch.optim.Adam, lr=0.05)]),
)
def test_pipedream_takes_the_steps_of_its_rule(subject, world, n_stages, more, vertical_sync, recompute, optimizer):
    n_microbatches = 2 * n_stages + more
    start = starter(
        subject,
        MSE,
        schedule="pipedream",
        n_microbatches=n_microbatches,
        optimizer=optimizer,
        vertical_sync=vertical_sync,
        recompute=recompute,
        split="parameters",
    )
    check_pipedream(
        start,
        partial(tanh_net, n_stages),
        MSE,
        samples(n_microbatches * 2 + 1),
        world,
        world_size=n_stages,
        n_microbatches=n_microbatches,
        optimizer=optimizer,
        vertical_sync=vertical_sync,
    )


def test_pipedream_on_one_rank_is_plain_sgd(subject, world):
    x, y = samples(6)

    def train():
        torch.manual_seed(0)
        model = tanh_net()
        subject(model, MSE, schedule="pipedream", n_microbatches=6, optimizer=MOMENTUM).step(x, y)
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    torch.manual_seed(0)
    model = tanh_net()
    optimizer = MOMENTUM(model.parameters())
    for i in range(6):
        optimizer.zero_grad()
        MSE(model(x[i : i + 1]), y[i : i + 1]).backward()
        optimizer.step()
    (found,) = world.run(train, world_size=1)
    assert torch.equal(found, nn.utils.parameters_to_vector(model.parameters()))


def test_pipedream_stashes_no_more_versions_than_stages_are_left(subject, world):
    def peaks():
        pipeline = subject(tanh_net(), MSE, schedule="pipedream", n_microbatches=12, optimizer=SGD)
        pipeline.step(*samples(12))
        return [stash.peak for stash in pipeline._stashes.values()]

    assert world.run(peaks, world_size=4) == [[4], [3], [2], [1]]


def test_replicas_of_pipedream_stay_equal(subject, world):
    def train():
        rank = dist.get_rank()
        pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        stages = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        torch.manual_seed(rank)
        keywords = {"schedule": "pipedream", "n_microbatches": 5, "optimizer": SGD}
        pipeline = subject(tanh_net(), MSE, group=pipelines[rank // 2], data_group=stages[rank % 2], **keywords)
        pipeline.step(*samples(5, seed=rank // 2))
        return nn.utils.parameters_to_vector(pipeline.module.parameters()).detach()

    ranks = world.run(train, world_size=4)
    assert torch.equal(ranks[0], ranks[2])
    assert torch.equal(ranks[1], ranks[3])


# several devices in one process


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_several_devices_of_one_process_take_the_steps_of_one(subject, world, schedule):
    def start(model):
        pipeline = subject(model, MSE, schedule=schedule, n_microbatches=4, devices=["cpu", "cpu"], recompute=True)

        def step(inputs, targets):
            result = pipeline.step(inputs, targets)
            return result.loss, result.outputs

        return pipeline.module, step

    for make in (tanh_net, tied_net) if schedule != "interleaved" else (tanh_net,):
        check_pipeline(start, make, MSE, [samples(9), samples(4)], world, world_size=1, n_microbatches=4)


def test_slices_of_a_model_on_two_devices_need_no_process_group(subject):
    model = tanh_net()
    x, y = samples(4)
    expected = model(x)
    pipeline = subject(model, MSE, schedule="gpipe", n_microbatches=1, devices=["cpu", torch.device("cpu")])
    assert torch.equal(pipeline.infer(x).outputs, expected)
    assert pipeline.infer(x, y).loss == MSE(expected, y)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_on_one_gpu_take_the_steps_of_one_process(subject, schedule):
    torch.manual_seed(0)
    model = tied_net().double().cuda()
    x, y = (t.double().cuda() for t in samples(9))
    MSE(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    subject(model, MSE, schedule=schedule, n_microbatches=4, devices=["cuda:0"] * 3, recompute=True).step(x, y)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, grad, rtol=1e-9)


# inference


def test_infer_returns_the_outputs_in_order_and_leaves_no_trace(subject, world):
    x, y = samples(7)

    def infer():
        torch.manual_seed(0)
        pipeline = subject(tanh_net(), MSE, n_microbatches=3)
        pipeline.module.eval()
        result = pipeline.infer(x if dist.get_rank() == 0 else None)
        both = pipeline.infer(x, y)
        assert all(p.grad is None for p in pipeline.module.parameters())
        return result, both

    torch.manual_seed(0)
    expected = tanh_net()(x)
    *others, (last, both) = world.run(infer, world_size=3)
    assert all(result.outputs is None and result.loss is None for pair in others for result in pair)
    assert torch.allclose(last.outputs, expected)
    assert last.loss is None
    assert torch.allclose(both.loss, MSE(expected, y))
    assert not last.outputs.requires_grad


def test_outputs_may_be_left_out(subject, world):
    def step():
        result = subject(tanh_net(), MSE, n_microbatches=2).step(*samples(4), keep_outputs=False)
        return result.outputs, result.loss is None

    assert world.run(step, world_size=2) == [(None, True), (None, False)]


def test_batch_norm_and_dropout_are_not_run_an_extra_time(subject, world):
    """The pass on zeros that finds shapes leaves buffers and random numbers alone."""

    def counted():
        pipeline = subject(dropout_net(), MSE, n_microbatches=3)
        torch.manual_seed(5)
        outputs = pipeline.infer(*samples(6)).outputs
        torch.manual_seed(5)
        again = pipeline.infer(*samples(6)).outputs
        assert outputs is None or torch.equal(outputs, again)
        return [int(m.num_batches_tracked) for m in pipeline.module.modules() if isinstance(m, nn.BatchNorm1d)]

    assert [count for counts in world.run(counted, world_size=2) for count in counts] == [6]


# bad input: the same error on every rank, and nobody waits


def errors(world, program, world_size=2):
    """What each rank raised, in words."""

    def caught():
        try:
            program(dist.get_rank())
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return world.run(caught, world_size=world_size)


def test_a_batch_smaller_than_its_micro_batches_is_refused_on_every_rank(subject, world):
    def program(rank):
        pipeline = subject(tanh_net(), MSE, n_microbatches=4)
        pipeline.step(*samples(4))
        x, y = samples(3)
        pipeline.step(x if rank == 0 else None, y if rank == 2 else None)

    found = errors(world, program, 3)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline got inputs of 3 samples for n_microbatches=4; give it a larger")


def test_a_pipeline_goes_on_after_a_step_that_was_refused(subject, world):
    def program():
        torch.manual_seed(0)
        pipeline = subject(tanh_net(), MSE, n_microbatches=2)
        pipeline.step(*samples(4))
        first = [p.grad.clone() for p in pipeline.module.parameters()]
        pipeline.module.zero_grad()
        x, y = samples(4)
        for inputs, targets in ((x, y[:3]), (x[:1], y[:1]), (x, None), (None, y)):
            with pytest.raises(ValueError, match="Pipeline"):
                pipeline.step(inputs, targets)
        assert all(p.grad is None for p in pipeline.module.parameters())
        assert not any(stage.live for stage in pipeline._built.stages.values())
        pipeline.step(x, y)
        return all(torch.equal(p.grad, grad) for p, grad in zip(pipeline.module.parameters(), first, strict=True))

    assert world.run(program, world_size=2) == [True, True]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 3)),
            "ValueError: stage 1 cannot take what stage 0 returns, float32 (2, 4): RuntimeError: mat1 and mat2 shapes",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
            "ValueError: stage 0 cannot take the inputs, float32 (2, 3): RuntimeError: mat1 and mat2 shapes",
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double()),
            "ValueError: stage 1 cannot take what stage 0 returns, float32 (2, 3): RuntimeError: mat1 and mat2 must",
        ),
        (
            lambda: nn.Sequential(nn.LSTM(3, 3), nn.Linear(3, 3)),
            "ValueError: stage 0 cannot take the inputs, float32 (2, 3): TypeError: stage 0 returns tuple; what goes",
        ),
    ],
    ids=["shape", "inputs", "dtype", "nested"],
)
def test_stages_that_do_not_fit_are_refused_on_every_rank(subject, world, model, message):
    found = errors(world, lambda rank: subject(model(), MSE, n_microbatches=2).step(*samples(4)))
    assert len(set(found)) == 1
    assert found[0].startswith(message)


def test_targets_and_inputs_of_unequal_number_are_refused_on_every_rank(subject, world):
    def program(rank):
        x, y = samples(6)
        subject(tanh_net(), MSE, n_microbatches=2).step(x if rank == 0 else None, y[:5] if rank else None)

    assert (
        errors(world, program)
        == ["ValueError: Pipeline needs a target for every input, got batches of 5 and 6 samples"] * 2
    )


def test_an_error_in_one_pipeline_reaches_the_ranks_of_the_other(subject, world):
    def program(rank):
        pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        stages = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        pipeline = subject(tanh_net(), MSE, n_microbatches=2, group=pipelines[rank // 2], data_group=stages[rank % 2])
        pipeline.step(*samples(4 if rank < 2 else 1))

    found = errors(world, program, 4)
    assert len(set(found)) == 1
    assert "inputs of 1 samples for n_microbatches=2" in found[0]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"n_microbatches": 0}, "ValueError: one_f_one_b needs n_microbatches of at least 1, got n_microbatches=0"),
        ({}, "ValueError: Pipeline needs n_microbatches with schedule='1f1b'"),
        ({"n_microbatches": 2, "schedule": "2f2b"}, "ValueError: Pipeline knows schedule '1f1b', 'gpipe'"),
        ({"schedule": gpipe(3, 2)}, "ValueError: Pipeline got a schedule for 3 ranks, the pipeline has 2"),
        ({"schedule": gpipe(2, 2), "n_microbatches": 3}, "ValueError: Pipeline got n_microbatches=3 and a schedule"),
        ({"schedule": "interleaved", "n_microbatches": 3}, "ValueError: interleaved_1f1b needs n_microbatches to be a"),
        ({"stages_per_rank": 2, "n_microbatches": 3}, "ValueError: Pipeline takes stages_per_rank with"),
        ({"schedule": "pipedream", "n_microbatches": 2}, "ValueError: Pipeline needs optimizer with pipedream"),
        ({"optimizer": SGD, "n_microbatches": 2}, "ValueError: Pipeline takes optimizer and vertical_sync with"),
        (
            {"reduction": "none", "n_microbatches": 2},
            "ValueError: Pipeline knows reduction 'mean' and 'sum', got 'none'",
        ),
        ({"reduction": "sum", "n_microbatches": 2}, "ValueError: Pipeline got reduction='sum' for a loss that has"),
        ({"split": "weight", "n_microbatches": 2}, "ValueError: split_model knows by='layers', 'parameters', 'time'"),
        ({"split": [9], "n_microbatches": 2}, "ValueError: split_model got positions [9] for 2 stages of 4 layers"),
        ({"split": "time", "n_microbatches": 2}, "ValueError: split_model needs sample"),
        (
            {"split": [3], "n_microbatches": 2},
            "ValueError: split_model: stage 1 has no parameters, its layers are 3 (Tanh)",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value) or "nothing",
)
def test_a_pipeline_refuses(subject, world, keywords, message):
    found = errors(world, lambda rank: subject(tanh_net(2), MSE, **keywords))
    assert len(set(found)) == 1
    assert found[0].startswith(message)


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (tanh_net(1), MSE, "ValueError: split_model got n_stages=3 for 2 layers; take at most 2"),
        (tanh_net(2), MSE, "ValueError: split_model got n_stages=3, but only 2 of 4 layers have parameters"),
        (nn.Linear(2, 2), MSE, "TypeError: a pipeline takes an nn.Sequential, got Linear"),
        (nn.Sequential(), MSE, "ValueError: a pipeline needs layers, got an empty nn.Sequential"),
        (tanh_net(3), "mse", "TypeError: Pipeline takes loss as a function of outputs and targets, got str"),
    ],
    ids=["layers", "parameters", "linear", "empty", "loss"],
)
def test_a_pipeline_refuses_models_that_it_cannot_cut(subject, world, model, loss, message):
    found = errors(world, lambda rank: subject(model, loss, n_microbatches=2), 3)
    assert len(set(found)) == 1
    assert found[0].startswith(message)


def test_tied_stages_are_refused_under_pipedream(subject, world):
    found = errors(world, lambda rank: subject(tied_net(), MSE, schedule="pipedream", n_microbatches=2, optimizer=SGD))
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline cannot keep '0.weight' tied under pipedream: its stages take")


def test_ranks_with_other_arguments_are_refused_on_every_rank(subject, world):
    found = errors(world, lambda rank: subject(tanh_net(), MSE, n_microbatches=2 + rank))
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline was made otherwise on rank 1 of its group than on rank 0")


def test_a_step_without_a_loss_is_refused(subject, world):
    found = errors(world, lambda rank: subject(tanh_net(), n_microbatches=2).step(*samples(4)))
    assert found == ["ValueError: Pipeline needs a loss for this: give it one, or call infer without targets"] * 2


# schedules of one's own


@few
@given(data=st.data())
def test_any_order_that_can_be_laid_out_gives_the_gradients_of_one_process(subject, world, data):
    """Ranks do their passes in a drawn order; what waits for ever is refused, all else works."""
    n_stages, n_microbatches = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 3))
    left = [list(order) for order in (gpipe(n_stages, n_microbatches).rows)]
    done: set[Cell] = set()
    orders = [[] for _ in left]
    cells = [[cell for cell in row if cell] for row in left]
    while any(cells):
        ready = [(rank, cell) for rank, own in enumerate(cells) for cell in own if set(cell.needs(n_stages)) <= done]
        rank, cell = data.draw(st.sampled_from(ready))
        cells[rank].remove(cell)
        orders[rank].append(cell)
        done.add(cell)
    schedule = lay_out("drawn", orders)
    check_schedule(schedule.rows, name="drawn")
    start = starter(subject, MSE, schedule=schedule)
    check_pipeline(
        start, tanh_net, MSE, [samples(n_microbatches + 1)], world, world_size=n_stages, n_microbatches=n_microbatches
    )


def test_an_invalid_schedule_is_refused_with_its_grid(subject, world):
    rows = [list(row) for row in one_f_one_b(2, 2).rows]
    rows[1][2], rows[1][1] = rows[1][1], rows[1][2]
    schedule = parse_schedule("mine", rows)
    found = errors(world, lambda rank: subject(tanh_net(), MSE, schedule=schedule))
    assert len(set(found)) == 1
    assert "ValueError: mine: 1B0 on rank 1 in step 1 needs 1F0, which is made in step 2 on rank 1\n" in found[0]
    assert ">B0<" in found[0]


def test_stages_of_a_schedule_may_be_on_ranks_in_any_order(subject, world):
    """The first and the last stage on rank 0, as in a V: what they hand to themselves needs no message."""
    orders = [
        [Cell(stage, kind, i) for kind, stages in (("F", (0, 2)), ("B", (2, 0))) for stage in stages for i in range(3)],
        [Cell(1, kind, i) for kind in "FB" for i in range(3)],
    ]

    def start(model):
        pipeline = subject(model, MSE, schedule=lay_out("v", orders))

        def step(inputs, targets):
            result = pipeline.step(inputs, targets)
            return result.loss, result.outputs

        return pipeline.module, step

    check_pipeline(start, partial(tanh_net, 3), MSE, [samples(5)] * 2, world, world_size=2, n_microbatches=3)


def test_the_split_by_time_is_the_same_on_every_rank(subject, world):
    def stages():
        pipeline = subject(tanh_net(5), MSE, n_microbatches=2, split="time", sample=torch.ones(4, 3))
        pipeline.step(*samples(4))
        return pipeline.stages

    ranks = world.run(stages, world_size=3)
    assert ranks[0] == ranks[1] == ranks[2]
    assert [name for names in ranks[0] for name in names] == [str(i) for i in range(10)]


def test_pipedream_is_asynchronous_and_takes_the_order_of_1f1b():
    assert pipedream(3, 5).rows == one_f_one_b(3, 5).rows
