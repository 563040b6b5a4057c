"""Gradients at every k-th step are those of one process, or every rank gets an error."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pdlcheck.checks import check_gradients_equal_single_process, check_replicas_in_sync
from pdlcheck.checks.strategies import sample_shards, shard_sizes

from .models import UNFIT, tanh_net


class Gated(nn.Module):
    """A model whose second branch gets a gradient of None unless a sample has a positive first feature."""

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


@pytest.mark.if_subject_takes("bucket_bytes", "weight")
@pytest.mark.verifies("sync_gradients")
@given(shards=sample_shards(), bucket_bytes=st.sampled_from([1, 24, 40, 2**20]))
def test_sync_gradients_weighted_by_samples_is_the_gradient_of_one_process(subject, world, shards, bucket_bytes):
    def weighted_sync_gradients(model, num_samples):
        subject(model, weight=num_samples, bucket_bytes=bucket_bytes)

    check_gradients_equal_single_process(tanh_net, nn.MSELoss(), shards, weighted_sync_gradients, world)


@pytest.mark.if_subject_takes("weight")
@pytest.mark.verifies("sync_gradients")
@given(shards=sample_shards())
def test_a_gradient_that_some_ranks_lack_counts_as_zero_there(subject, world, shards):
    def weighted_sync_gradients(model, num_samples):
        subject(model, weight=num_samples)

    check_gradients_equal_single_process(Gated, nn.MSELoss(), shards, weighted_sync_gradients, world)


@pytest.mark.if_subject_takes("reduction")
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
@given(sizes=shard_sizes())
def test_replicas_stay_in_sync_with_sync_gradients(subject, world, sizes):
    check_replicas_of_gated(subject, sizes, world)


@pytest.mark.if_subject_takes("reduction")
@pytest.mark.verifies("sync_gradients")
@given(sizes=shard_sizes())
def test_replicas_stay_in_sync_with_sums_of_gradients(subject, world, sizes):
    check_replicas_of_gated(partial(subject, reduction="sum"), sizes, world)


def check_replicas_of_gated(sync_gradients, sizes, world):
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
            sync_gradients(model)
            optimizer.step()

        return model, step

    check_replicas_in_sync(start, world, world_size=len(sizes), steps=2)


@pytest.mark.if_subject_takes("reduction")
@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2, 3)
def test_a_gradient_that_is_none_everywhere_stays_none(subject, rank):
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    if rank == 1:
        model[1].weight.grad = torch.ones(1, 1)
    subject(model, reduction="sum")
    assert model[0].weight.grad is None
    assert model[1].weight.grad.item() == 1


@pytest.mark.if_subject_takes("weight")
@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(3)
def test_a_rank_of_weight_0_does_not_count_whatever_it_holds(subject, rank):
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([[4.0], [8.0], [float("nan")]])[rank]
    subject([weight], weight=[3, 1, 0][rank])
    assert weight.grad.item() == 5


@pytest.mark.beyond_contract("low precision that is summed in float32")
@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_gradients_are_summed_in_float32(subject, rank, dtype):
    weight = nn.Parameter(torch.zeros(1, dtype=dtype))
    weight.grad = torch.tensor([60000.0 if dtype == torch.float16 else 256.0], dtype=dtype)
    expected = weight.grad.clone()
    subject([weight])  # in float16 the sum would overflow
    assert weight.grad.equal(expected)
    assert weight.grad.dtype == dtype


@pytest.mark.beyond_contract("gradients of another dtype than their parameter")
@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_gradient_of_another_dtype_than_its_parameter_is_made_where_it_is_missing(subject, rank):
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = torch.full((2,), 2 / 3) if rank else None
    subject([weight])
    assert weight.grad.equal(torch.full((2,), 1 / 3))


@pytest.mark.if_subject_takes("step", "sync_every")
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


@pytest.mark.if_subject_takes("reduction")
@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
def test_a_shared_parameter_is_synchronised_once(subject, rank):
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([rank + 1.0])
    subject([weight, weight], reduction="sum")
    assert weight.grad.item() == 3


@pytest.mark.beyond_contract("error messages")
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


@pytest.mark.beyond_contract("error messages")
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
    assert [weight.grad.item() for weight in weights] == [rank] * len(weights)  # unchanged
    subject(weights)
    assert {weight.grad.item() for weight in weights} == {1}


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(3)
def test_a_sparse_gradient_of_one_rank_is_refused_on_all(subject, rank):
    weight = nn.Parameter(torch.zeros(3, 2))
    weight.grad = torch.ones(3, 2).to_sparse() if rank == 1 else torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"parameter '0' has layout torch.sparse_coo; build .* \(on rank 1\)$"):
        subject([weight])


@pytest.mark.beyond_contract("error messages")
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
        assert model.weight.grad.unique().item() == rank
        assert model.bias.grad is None


@pytest.mark.beyond_contract("error messages")
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

    def train():
        for step in range(4):
            weight.grad = torch.ones(1)
            subject([weight], step=step, **(common | other if rank == 2 else common))

    with pytest.raises(ValueError, match=f"^sync_gradients needs the same {message}$"):
        train()


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
def test_a_rank_that_never_synchronises_is_refused_alone(subject, rank):
    weight = nn.Parameter(torch.zeros(1))
    if rank == 1:
        with pytest.raises(ValueError, match=r"sync_gradients needs step of at least 0, got step=-1$"):
            subject([weight], sync_every=None, step=-1)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "empty", [nn.ReLU(), [], nn.Linear(1, 1).requires_grad_(False)], ids=["ReLU", "list", "frozen"]
)
def test_sync_gradients_refuses_an_empty_model(subject, empty):
    with pytest.raises(ValueError, match="sync_gradients got an empty model: no parameter requires a gradient"):
        subject(empty)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
def test_sync_gradients_refuses_a_set_because_it_has_no_order(subject):
    with pytest.raises(TypeError, match="a set, whose order differs between ranks; pass a list"):
        subject(set(tanh_net().parameters()))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
def test_sync_gradients_refuses_sparse_gradients(subject):
    model = nn.Embedding(3, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"parameter 'weight' has layout torch.sparse_coo; build the embedding with"):
        subject(model)
