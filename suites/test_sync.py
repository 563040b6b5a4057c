"""Replicas start alike, gradients are those of one process, averages are means."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from pdlcheck.checks import (
    check_average_parameters,
    check_broadcast_parameters,
    check_gradients_equal_single_process,
    check_replicas_in_sync,
    check_same_start,
)
from pdlcheck.checks.held import possible_order
from pdlcheck.checks.strategies import MakeLayers, group_ranks, module_makers, sample_shards, shard_sizes

few = settings(max_examples=10)


class Gated(nn.Module):
    """A second branch that only samples with a positive first feature use: elsewhere its gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(2, 1)
        self.sometimes = nn.Linear(2, 1)
        self.never = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.always(x))
        open_ = x[:, 0] > 0
        if open_.any():
            y = y + self.sometimes(x) * open_.unsqueeze(1)
        return y


def tanh_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


class Everything(nn.Module):
    """Every kind of state: tied weights, mixed dtypes, buffers of every sort, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3)
        self.decode = nn.Linear(3, 3)
        self.decode.weight = self.encode.weight
        self.half = nn.Linear(2, 2).half()
        self.conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        self.register_buffer("short", torch.ones(3, dtype=torch.int16))
        self.register_buffer("rope", torch.ones(2, 2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.ones(0))


class EverythingButBooleans(Everything):
    """Booleans have no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = None


@pytest.mark.verifies("broadcast_parameters")
@given(make=module_makers(), data=st.data())
def test_broadcast_parameters_gives_every_rank_the_model_of_src(subject, world, make, data):
    world_size = data.draw(st.integers(1, 4))
    src = data.draw(st.integers(0, world_size - 1))
    check_broadcast_parameters(subject, make, world, world_size=world_size, src=src)


@pytest.mark.verifies("broadcast_parameters")
@few
@given(data=st.data())
def test_broadcast_parameters_works_in_any_group(subject, world, data):
    world_size = data.draw(st.integers(1, 3))
    ranks, src = data.draw(group_ranks(world_size=world_size)), data.draw(st.integers(0, world_size - 1))
    check_broadcast_parameters(subject, Everything, world, ranks=ranks, src=src)


@pytest.mark.verifies("broadcast_parameters")
def test_broadcast_parameters_sends_every_kind_of_state(subject, world):
    check_broadcast_parameters(subject, Everything, world, world_size=3, src=1)


@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.parametrize("ranks", [None, possible_order([3, 1, 2])], ids=["everybody", "a group"])
def test_broadcast_parameters_by_messages_sends_every_kind_of_state(subject, world, ranks):
    check_broadcast_parameters(partial(subject, by="messages"), Everything, world, world_size=3, ranks=ranks, src=1)


@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_another_way_to_send(subject):
    with pytest.raises(ValueError, match="knows by='broadcast' and by='messages', got 'pigeon'"):
        subject(nn.Linear(1, 1), by="pigeon")


@pytest.mark.verifies("broadcast_parameters")
def test_broadcast_parameters_sends_a_model_that_only_has_buffers(subject, world):
    check_broadcast_parameters(subject, lambda: nn.BatchNorm1d(2, affine=False), world, world_size=2)


@pytest.mark.verifies("broadcast_parameters")
def test_replicas_start_alike_after_broadcast_parameters(subject, world):
    def make():
        model = tanh_net()
        subject(model)
        return model

    check_same_start(make, world, world_size=4)


@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_an_empty_model(subject):
    with pytest.raises(ValueError, match="broadcast_parameters got an empty model: ReLU has no parameter"):
        subject(nn.ReLU())


@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_a_lazy_model(subject):
    with pytest.raises(ValueError, match="'weight', which has no shape yet; run one forward pass first"):
        subject(nn.LazyLinear(2))


@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_expanded_tensors(subject):
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1).expand(3))
    with pytest.raises(ValueError, match=r"got 'mask', an expanded tensor, whose elements share .*; replace it by its"):
        subject(model)
    model.mask = model.mask.clone()
    subject(model)


@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_a_model_on_another_device(subject):
    with pytest.raises(ValueError, match="broadcast_parameters got 'weight' on device meta"):
        subject(nn.Linear(2, 2, device="meta"))


@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_a_src_outside_the_group(subject):
    with pytest.raises(ValueError, match=r"src=2, which is outside the group; src is a global rank, one of \[0, 1\]"):
        subject(nn.Linear(2, 2), src=2)


def sharded(mesh):
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()], run_check=False))
    return model


def on_meta(mesh):
    return nn.Linear(2, 2, device="meta")


def expanded(mesh):
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(torch.zeros(1).expand(2), requires_grad=False)
    return model


def crossed(mesh):
    model = nn.Linear(2, 2)
    weight = model.weight
    del model.weight
    model.weight = weight  # comes after the bias now
    return model


# of rank 1: what it passes, and what all ranks are told
BROADCASTS = {
    "src": ({"src": 7}, r"got src=7, which is outside the group; src is a global rank, one of \[0, 1, 2\]"),
    "no int": ({"src": "0"}, "takes src as a global rank, an int, got str"),
    "by": ({"by": "pigeon"}, "knows by='broadcast' and by='messages', got 'pigeon'"),
    "no module": ({"module": [1]}, "takes a torch.nn.Module, got list"),
    "empty": ({"module": lambda mesh: nn.ReLU()}, "got an empty model: ReLU has no parameter and no buffer"),
    "lazy": ({"module": lambda mesh: nn.LazyLinear(2)}, "got 'weight', which has no shape yet; .*"),
    "sharded": ({"module": sharded}, "needs tensors that each rank holds whole, 'bias' is a DTensor; .*"),
    "expanded": ({"module": expanded}, "got 'bias', an expanded tensor, whose elements share memory; replace it .*"),
    "device": ({"module": on_meta}, "got 'weight' on device meta, the group's backend .*"),
}
OTHER_MODELS = {
    "other src": ({"src": 1}, "the same src on every rank, got 0 on rank 0 and 1 on rank 1"),
    "more": (
        {"module": lambda mesh: nn.Sequential(nn.Linear(2, 2))},
        r"the same model on every rank: tensor 0 is 'weight' torch.float32 \(2, 2\) on cpu on rank 0, '0.weight' .*",
    ),
    "fewer": (
        {"module": lambda mesh: nn.Linear(2, 2, bias=False)},
        r"the same model .*: tensor 1 is 'bias' torch.float32 \(2,\) on cpu on rank 0, nothing on rank 1; .*",
    ),
    "shape": (
        {"module": lambda mesh: nn.Linear(2, 3)},
        r"the same model .* is 'weight' .* \(2, 2\) on cpu on rank 0, 'weight' .* \(3, 2\) on cpu on rank 1; .*",
    ),
    "dtype": (
        {"module": lambda mesh: nn.Linear(2, 2).double()},
        "the same model on every rank: tensor 0 is 'weight' torch.float32 .*, 'weight' torch.float64 .* on rank 1; .*",
    ),
    "order": ({"module": crossed}, "the same model .* 'weight' .* on rank 0, 'bias' .* on rank 1; .*"),
}


@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(3)
@pytest.mark.parametrize("by", ["broadcast", "messages"])
@pytest.mark.parametrize("case", [*BROADCASTS, *OTHER_MODELS])
def test_what_broadcast_parameters_refuses_on_one_rank_is_refused_on_all(subject, rank, case, by):
    if (case, by) == ("by", "messages"):
        pytest.skip("a way that nobody knows is taken for a broadcast")
    keywords, message = (BROADCASTS | OTHER_MODELS)[case]
    message = rf"{message} \(on rank 1\)" if case in BROADCASTS else f"needs {message}"
    model = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (3,))
    given = {"module": model, "src": 0, "by": by} | (keywords if rank == 1 else {})
    if not isinstance(given["module"], nn.Module | list):
        given["module"] = given["module"](mesh)
    with pytest.raises((TypeError, ValueError), match=f"^broadcast_parameters {message}$"):
        subject(**given)
    with torch.no_grad():
        model.weight.fill_(rank)
    subject(model, src=2, by=by)  # nobody was left in the middle
    assert model.weight.unique().item() == 2


@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_takes_what_ranks_may_have_differently(subject, rank):
    model = nn.Conv2d(2, 2, 2).requires_grad_(rank == 0)
    if rank:
        model.to(memory_format=torch.channels_last)
    subject(model)
    assert not model.weight.requires_grad or rank == 0
    everyone = [None, None]
    dist.all_gather_object(everyone, model.weight.tolist())
    assert everyone[0] == everyone[1]


@pytest.mark.verifies("sync_gradients")
@given(shards=sample_shards(), bucket_bytes=st.sampled_from([1, 24, 40, 2**20]))
def test_sync_gradients_weighted_by_samples_is_the_gradient_of_one_process(subject, world, shards, bucket_bytes):
    def weighted_sync_gradients(model, num_samples):
        subject(model, weight=num_samples, bucket_bytes=bucket_bytes)

    check_gradients_equal_single_process(tanh_net, nn.MSELoss(), shards, weighted_sync_gradients, world)


@pytest.mark.verifies("sync_gradients")
@given(shards=sample_shards())
def test_a_gradient_that_some_ranks_lack_counts_as_zero_there(subject, world, shards):
    def weighted_sync_gradients(model, num_samples):
        subject(model, weight=num_samples)

    check_gradients_equal_single_process(Gated, nn.MSELoss(), shards, weighted_sync_gradients, world)


@pytest.mark.verifies("sync_gradients")
@given(shards=sample_shards())
def test_sum_of_sums_is_the_gradient_of_one_process(subject, world, shards):
    def summed_sync_gradients(model, num_samples):
        subject(model, reduction="sum")

    check_gradients_equal_single_process(Gated, nn.MSELoss(reduction="sum"), shards, summed_sync_gradients, world)


@pytest.mark.verifies("sync_gradients")
@given(shards=sample_shards(sizes=st.integers(1, 4).map(lambda n: [2] * n)))
def test_the_mean_over_even_shards_is_the_gradient_of_one_process(subject, world, shards):
    def plain_sync_gradients(model, num_samples):
        subject(model)

    check_gradients_equal_single_process(tanh_net, nn.MSELoss(), shards, plain_sync_gradients, world)


@pytest.mark.verifies("sync_gradients")
@given(sizes=shard_sizes(), reduction=st.sampled_from(["mean", "sum"]))
def test_replicas_stay_in_sync_with_sync_gradients(subject, world, sizes, reduction):
    def start():
        torch.manual_seed(0)
        model = Gated()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(dist.get_rank() + 1)
        mine = sizes[dist.get_rank()]

        def step(i):
            optimizer.zero_grad()
            if mine:
                model(torch.randn(mine, 2)).square().mean().backward()
            subject(model, reduction=reduction)
            optimizer.step()

        return model, step

    check_replicas_in_sync(start, world, world_size=len(sizes), steps=2)


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2, 3)
def test_a_gradient_that_is_none_everywhere_stays_none(subject, rank):
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    if rank == 1:
        model[1].weight.grad = torch.ones(1, 1)
    subject(model, reduction="sum")
    assert model[0].weight.grad is None
    assert model[1].weight.grad.item() == 1


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(3)
def test_a_rank_of_weight_0_does_not_count_whatever_it_holds(subject, rank):
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([[4.0], [8.0], [float("nan")]])[rank]
    subject([weight], weight=[3, 1, 0][rank])
    assert weight.grad.item() == 5


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_gradients_are_summed_in_float32(subject, rank, dtype):
    weight = nn.Parameter(torch.zeros(1, dtype=dtype))
    weight.grad = torch.tensor([60000.0 if dtype == torch.float16 else 256.0], dtype=dtype)
    expected = weight.grad.clone()
    subject([weight])  # in float16 the sum overflows
    assert weight.grad.equal(expected)
    assert weight.grad.dtype == dtype


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("sync_every", [1, 2, 4])
def test_gradients_are_synchronised_at_every_kth_step_only(subject, rank, sync_every):
    weight = nn.Parameter(torch.zeros(1))
    for step in range(8):
        weight.grad = torch.tensor([float(rank)])
        synced = subject([weight], sync_every=sync_every, step=step)
        assert synced is (step % sync_every == sync_every - 1)
        assert weight.grad.item() == (0.5 if synced else rank)


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
def test_a_shared_parameter_is_synchronised_once(subject, rank):
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([rank + 1.0])
    subject([weight, weight], reduction="sum")
    assert weight.grad.item() == 3


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"reduction": "average"}, "knows reduction 'mean' and 'sum', got 'average'"),
        ({"sync_every": 0}, "needs sync_every of at least 1, got sync_every=0"),
        ({"step": -1}, "needs step of at least 0, got step=-1"),
        ({"bucket_bytes": 0}, "needs bucket_bytes of at least 1, got bucket_bytes=0"),
        ({"weight": -1}, "finite weight that is not negative, got weight=-1"),
        ({"weight": float("nan")}, "finite weight that is not negative, got weight=nan"),
        ({"weight": 2, "reduction": "sum"}, "takes weight with reduction='mean' only"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_sync_gradients_refuses(subject, keywords, message):
    model = tanh_net()
    with pytest.raises(ValueError, match=f"sync_gradients {message}" if "weight" not in message else message):
        subject(model, **keywords)


ON_ONE_RANK = {
    "sync_every": ({"sync_every": 0}, "needs sync_every of at least 1, got sync_every=0"),
    "not an int": ({"sync_every": 1.5}, "takes sync_every as an int, got float"),
    "step": ({"step": -1, "sync_every": 3}, "needs step of at least 0, got step=-1"),
    "reduction": ({"reduction": "average"}, "knows reduction 'mean' and 'sum', got 'average'"),
    "bucket_bytes": ({"bucket_bytes": 0}, "needs bucket_bytes of at least 1, got bucket_bytes=0"),
    "weight": ({"weight": math.nan}, "needs a finite weight that is not negative, got weight=nan"),
}


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(3)
@pytest.mark.parametrize("sizes", [{}, {"bucket_bytes": 1}], ids=["one bucket", "a bucket each"])
@pytest.mark.parametrize("case", ON_ONE_RANK)
def test_what_sync_gradients_refuses_on_one_rank_is_refused_on_all(subject, rank, case, sizes):
    keywords, message = ON_ONE_RANK[case]
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(1 if case == "bucket_bytes" else 2)]
    for weight in weights:
        weight.grad = torch.tensor([float(rank)])
    more = sizes | ({"weight": 1.0} if "weight" in keywords else {})
    with pytest.raises((TypeError, ValueError), match=rf"^sync_gradients {message} \(on rank 1\)$"):
        subject(weights, **(more | keywords if rank == 1 else more))
    assert [weight.grad.item() for weight in weights] == [rank] * len(weights)  # nothing was changed
    subject(weights)
    assert {weight.grad.item() for weight in weights} == {1}


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(3)
def test_a_sparse_gradient_of_one_rank_is_refused_on_all(subject, rank):
    weight = nn.Parameter(torch.zeros(3, 2))
    weight.grad = torch.ones(3, 2).to_sparse() if rank == 1 else torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"parameter '0' has layout torch.sparse_coo; build .* \(on rank 1\)$"):
        subject([weight])


UNFIT = {
    "sharded": (sharded, "needs tensors that each rank holds whole, '.*' is a DTensor; torch's .*"),
    "device": (on_meta, "got '.*' on device meta, the group's backend .*"),
}


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(3)
@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("bucket_bytes", [1, 100])
def test_parameters_of_one_rank_that_cannot_be_sent_are_refused_on_all(subject, rank, case, bucket_bytes):
    make, message = UNFIT[case]
    mesh = init_device_mesh("cpu", (3,))
    model = make(mesh) if rank == 1 else nn.Linear(2, 2)
    if rank != 1:
        model.weight.grad = torch.full((2, 2), float(rank))
    with pytest.raises(ValueError, match=rf"^sync_gradients {message} \(on rank 1\)$"):
        subject(model, bucket_bytes=bucket_bytes)
    if rank != 1:
        assert model.weight.grad.unique().item() == rank and model.bias.grad is None  # nothing was changed


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("common", "other", "message"),
    [
        ({"sync_every": 1}, {"sync_every": 2}, "sync_every on every rank, got 1 on rank 0 and 2 on rank 2"),
        ({"sync_every": 2}, {"sync_every": 4}, "sync_every on every rank, got 2 on rank 0 and 4 on rank 2"),
        ({}, {"reduction": "sum"}, "reduction on every rank, got mean on rank 0 and sum on rank 2"),
        ({}, {"bucket_bytes": 99}, "bucket_bytes on every rank, got 26214400 on rank 0 and 99 on rank 2"),
        ({}, {"weight": 2}, "way to count on every rank, got no weight on rank 0 and a weight on rank 2"),
    ],
    ids=["1 or 2", "2 or 4", "reduction", "bucket_bytes", "weight"],
)
def test_settings_of_sync_gradients_that_differ_are_an_error_on_every_rank(subject, rank, common, other, message):
    weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=f"^sync_gradients needs the same {message}$"):
        for step in range(4):
            weight.grad = torch.ones(1)
            subject([weight], step=step, **(common | other if rank == 2 else common))


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
def test_a_rank_that_never_synchronises_is_refused_alone(subject, rank):
    weight = nn.Parameter(torch.zeros(1))
    if rank == 1:
        with pytest.raises(ValueError, match=r"sync_gradients needs step of at least 0, got step=-1$"):
            subject([weight], sync_every=None, step=-1)


@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("drop", r"knows buffers 'average', 'broadcast' and 'keep', got 'drop' \(on rank 1\)$"),
        ("keep", "needs the same buffers on every rank, got average on rank 0 and keep on rank 1$"),
    ],
)
def test_what_average_parameters_refuses_on_one_rank_is_refused_on_all(subject, rank, other, message):
    model = tanh_net()
    model.register_buffer("count", torch.tensor(3))  # a message of its own on the ranks that average it
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"^average_parameters {message}"):
        subject(model, buffers=other if rank == 1 else "average")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    subject(model)


@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(3)
@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("buffers", ["average", "broadcast"])
def test_a_model_of_one_rank_that_cannot_be_sent_is_not_averaged_on_any(subject, rank, case, buffers):
    make, message = UNFIT[case]
    mesh = init_device_mesh("cpu", (3,))
    model = make(mesh) if rank == 1 else nn.Linear(2, 2)
    model.register_buffer("count", torch.tensor(3))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"^average_parameters {message} \(on rank 1\)$"):
        subject(model, buffers=buffers)
    if rank != 1:
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "empty", [nn.ReLU(), [], nn.Linear(1, 1).requires_grad_(False)], ids=["ReLU", "list", "frozen"]
)
def test_sync_gradients_refuses_an_empty_model(subject, empty):
    with pytest.raises(ValueError, match="sync_gradients got an empty model: no parameter requires a gradient"):
        subject(empty)


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
def test_sync_gradients_refuses_a_set_because_it_has_no_order(subject):
    with pytest.raises(TypeError, match="a set, whose order differs between ranks; pass a list"):
        subject(set(tanh_net().parameters()))


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
def test_sync_gradients_refuses_sparse_gradients(subject):
    model = nn.Embedding(3, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"parameter 'weight' has layout torch.sparse_coo; build the embedding with"):
        subject(model)


@pytest.mark.verifies("average_parameters")
@given(make=module_makers(), world_size=st.integers(1, 4))
def test_average_parameters_is_the_mean_over_ranks(subject, world, make, world_size):
    check_average_parameters(subject, make, world, world_size=world_size)


@pytest.mark.verifies("average_parameters")
@few
@given(data=st.data())
def test_average_parameters_divides_by_the_size_of_the_group(subject, world, data):
    ranks = data.draw(group_ranks(world_size=data.draw(st.integers(1, 3))))
    check_average_parameters(subject, EverythingButBooleans, world, ranks=ranks)


@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(2)
def test_a_mean_of_integers_is_exact_or_an_error_on_every_rank(subject, rank):
    model = nn.BatchNorm1d(1)
    model.num_batches_tracked.fill_(rank + 2)
    model.weight.data.fill_(rank)
    with pytest.raises(
        ValueError, match=r"cannot average 'num_batches_tracked', torch.int64: the sum over 2 ranks is 5"
    ):
        subject(model)
    assert model.weight.item() == rank  # nothing was changed
    model.num_batches_tracked.fill_(2 * rank + 3)
    subject(model)
    assert model.num_batches_tracked.item() == 4


@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.int64, [2**62, 2**62, 2**62]),
        (torch.int64, [-(2**63), -(2**63), -(2**63)]),
        (torch.int64, [2**63 - 1, -(2**63), 1]),
        (torch.int64, [2**63 - 1, 2**63 - 2, 2**63 - 3]),
        (torch.int8, [127, 127, 124]),
        (torch.uint64, [2**64 - 1, 2**64 - 1, 2**63 - 2]),
        (torch.uint64, [0, 2, 2**64 - 3]),
    ],
)
def test_a_mean_of_large_integers_does_not_overflow(subject, rank, dtype, values):
    model = nn.BatchNorm1d(1)
    model.num_batches_tracked = torch.tensor(values[rank], dtype=dtype)
    subject(model)
    assert model.num_batches_tracked.item() == sum(values) // 3
    model.num_batches_tracked = torch.tensor(2**63 - 1 - (rank == 0))
    with pytest.raises(ValueError, match=f"the sum over 3 ranks is {3 * (2**63 - 1) - 1}, its mean is not an integer"):
        subject(model)


@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(("buffers", "expected"), [("broadcast", [2, 2]), ("keep", [2, 3])])
def test_buffers_are_broadcast_or_kept_on_demand(subject, rank, buffers, expected):
    model = nn.BatchNorm1d(1)
    model.num_batches_tracked.fill_(rank + 2)
    model.weight.data.fill_(rank)
    subject(model, buffers=buffers)
    assert model.num_batches_tracked.item() == expected[rank]
    assert model.weight.item() == 0.5


@pytest.mark.verifies("average_parameters")
def test_the_average_of_equal_models_is_the_model(subject, world):
    def distance():
        torch.manual_seed(7)
        model = tanh_net()
        before = [p.detach().clone() for p in model.parameters()]
        subject(model)
        return max(
            float(((p.detach() - b).abs() / b.abs()).max()) for p, b in zip(model.parameters(), before, strict=True)
        )

    for world_size in (1, 2, 3, 5):
        # adding world_size equal terms and dividing rounds at most world_size times
        assert max(world.run(distance, world_size=world_size)) <= world_size * torch.finfo(torch.float32).eps


@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(2)
def test_average_parameters_refuses_what_it_does_not_know(subject):
    with pytest.raises(ValueError, match="knows buffers 'average', 'broadcast' and 'keep', got 'drop'"):
        subject(tanh_net(), buffers="drop")
    with pytest.raises(ValueError, match="average_parameters got an empty model: ReLU has no parameter"):
        subject(nn.ReLU())
    with pytest.raises(TypeError, match=r"average_parameters takes a torch.nn.Module, got list"):
        subject([])


@pytest.mark.verifies("broadcast_parameters")
def test_tied_weights_of_drawn_models_stay_tied(subject, world):
    check_broadcast_parameters(subject, MakeLayers((2, 2), batch_norm=True, tied=True), world, world_size=2)
