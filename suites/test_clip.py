"""One norm clips the gradients of all ranks: each element counts once, and every rank gets the same norm."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pdlcheck.checks import check_clip_grad_norm
from pdlcheck.worlds import get_world

few = settings(max_examples=8)
NORMS = st.sampled_from([2.0, 1.0, 3.0, math.inf])


@st.composite
def rank_gradients(draw, *, same=False, dtypes=(torch.float32, torch.float64, torch.float16, torch.bfloat16)):
    """Draw gradients of 1 to 4 ranks.

    They have several dtypes, unlike magnitudes, None, empty tensors, and ranks without parameters.
    """
    world_size = draw(st.integers(1, 4))
    shapes = st.sampled_from([(3,), (2, 2), (), (0,), None])
    everyone = []
    for rank in range(world_size):
        if same and rank:
            everyone.append([None if grad is None else grad.clone() for grad in everyone[0]])
            continue
        own = []
        for position, shape in enumerate(draw(st.lists(shapes, max_size=3))):
            dtype = draw(st.sampled_from(dtypes))
            size = draw(st.sampled_from([0.01, 1.0, 300.0]))
            start = (rank + position + 1) * size
            n = 1 if shape is None else math.prod(shape)
            own.append(None if shape is None else torch.linspace(start, -size, n).to(dtype).view(shape))
        everyone.append(own)
    if not any(grad is not None and grad.any() for own in everyone for grad in own):
        for own in everyone if same else everyone[:1]:
            own.append(torch.tensor([2.0]))
    return everyone


@pytest.mark.if_subject_takes("norm_type", "sharded")
@pytest.mark.verifies("clip_grad_norm")
@settings(max_examples=15)
@given(gradients=rank_gradients(), max_norm=st.sampled_from([1e-3, 1.0, 1e4]), norm_type=NORMS)
def test_sharded_gradients_are_clipped_by_the_norm_of_all(subject, world, gradients, max_norm, norm_type):
    def clip(parameters, max_norm):
        return subject(parameters, max_norm, norm_type=norm_type, sharded=True)

    check_clip_grad_norm(clip, world, gradients=gradients, max_norm=max_norm, norm_type=norm_type)


@pytest.mark.verifies("clip_grad_norm")
@few
@given(gradients=rank_gradients(same=True, dtypes=[torch.float32]), max_norm=st.sampled_from([1e-3, 1.0, 1e4]))
def test_gradients_that_every_rank_holds_are_clipped_by_their_norm(subject, world, gradients, max_norm):
    counted = [[rank == 0] * len(own) for rank, own in enumerate(gradients)]
    check_clip_grad_norm(subject, world, gradients=gradients, max_norm=max_norm, counted=counted)


@pytest.mark.if_subject_takes("agree", "norm_type")
@pytest.mark.verifies("clip_grad_norm")
@few
@given(
    gradients=rank_gradients(same=True),
    max_norm=st.sampled_from([1e-3, 1.0, 1e4]),
    norm_type=NORMS,
    agree=st.booleans(),
)
def test_replicated_gradients_count_once(subject, world, gradients, max_norm, norm_type, agree):
    def clip(parameters, max_norm):
        return subject(parameters, max_norm, norm_type=norm_type, agree=agree)

    counted = [[rank == 0] * len(own) for rank, own in enumerate(gradients)]
    check_clip_grad_norm(clip, world, gradients=gradients, max_norm=max_norm, norm_type=norm_type, counted=counted)


@pytest.mark.if_subject_takes("copies", "norm_type", "sharded")
@pytest.mark.verifies("clip_grad_norm")
@few
@given(world_size=st.integers(2, 4), norm_type=NORMS)
def test_a_tied_embedding_and_a_replicated_norm_count_once_among_sharded_ones(subject, world, world_size, norm_type):
    """The embedding is on the first and the last rank, the layer norm on all, the linear layer is sharded."""
    embedding, norm = torch.tensor([3.0, 4.0]), torch.tensor([5.0])
    gradients, counted = [], []
    for rank in range(world_size):
        gradients.append([norm, torch.tensor([1.0 + rank]), embedding if rank in (0, world_size - 1) else None])
        counted.append([rank == 0, True, rank == 0])

    def clip(parameters, max_norm):
        tied = parameters[2:] if dist.get_rank() == world_size - 1 else []
        return subject(parameters, max_norm, norm_type=norm_type, sharded=parameters[1:], copies=tied)

    check_clip_grad_norm(clip, world, gradients=gradients, max_norm=1.0, norm_type=norm_type, counted=counted)


@pytest.mark.if_subject_takes("error_if_nonfinite", "sharded")
@pytest.mark.verifies("clip_grad_norm")
@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 300.0), (torch.bfloat16, 1e20), (torch.float32, 1e30)])
def test_squares_that_overflow_do_not_make_the_norm_infinite(subject, world, dtype, value):
    def clip(parameters, max_norm):
        return subject(parameters, max_norm, sharded=True, error_if_nonfinite=True)

    gradients = [[torch.full((4,), value, dtype=dtype)], [torch.full((2,), value / 2, dtype=dtype)]]
    check_clip_grad_norm(clip, world, gradients=gradients, max_norm=1.0)


@pytest.mark.beyond_contract("modules, and tensors that are listed twice")
@pytest.mark.verifies("clip_grad_norm")
@pytest.mark.world_size(2)
def test_a_tensor_that_is_listed_twice_counts_once(subject):
    layers = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    layers[1].weight = layers[0].weight
    layers[0].weight.grad = torch.tensor([[4.0]])
    assert subject([layers[0].weight, layers[1].weight], 2.0).item() == 4.0
    assert layers[0].weight.grad.item() == pytest.approx(2.0, rel=1e-6)
    assert subject(layers, math.inf).item() == pytest.approx(2.0, rel=1e-6)


@pytest.mark.if_subject_takes("norm_type", "sharded")
@pytest.mark.verifies("clip_grad_norm")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("values", [(1.0, math.inf, 1.0), (1.0, math.nan, 1.0), (math.inf, 1.0, math.nan)])
@pytest.mark.world_size(3)
def test_a_norm_that_is_not_finite_is_so_on_every_rank(subject, rank, values, norm_type):
    expected = "nan" if any(map(math.isnan, values)) else "inf"
    weight = weight_with(1.0, values[rank])
    norm = subject([weight], 1.0, norm_type=norm_type, sharded=True)
    assert str(norm.item()) == expected


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("clip_grad_norm")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize(("value", "shown"), [(math.inf, "inf"), (math.nan, "nan")])
@pytest.mark.world_size(3)
def test_a_norm_that_is_not_finite_may_be_an_error_on_every_rank(subject, rank, value, shown, norm_type):
    weight = weight_with(1.0, value if rank == 1 else 1.0)
    with pytest.raises(RuntimeError, match=f"found a norm of {shown} over all ranks and error_if_nonfinite is set"):
        subject([weight], 1.0, norm_type=norm_type, sharded=True, error_if_nonfinite=True)
    assert weight.grad[0] == 1.0


@pytest.mark.if_subject_takes("agree")
@pytest.mark.verifies("clip_grad_norm")
def test_nothing_is_sent_where_ranks_need_not_agree(subject):
    def clip(agree):
        weight = weight_with(3.0, 4.0)
        return subject([weight], 1.0, agree=agree).item()

    world = get_world("sim")
    assert world.run(clip, False, world_size=3) == [5.0] * 3
    assert world.traffic.sent_bytes(rank=0) == 0
    world.run(clip, True, world_size=3)
    assert world.traffic.sent_bytes(rank=0) > 0


@pytest.mark.if_subject_takes("group", "sharded")
@pytest.mark.verifies("clip_grad_norm")
def test_a_norm_is_that_of_the_group(subject, world):
    def clip():
        group = dist.new_group([1, 2])
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.tensor([[8.0, 3.0, 4.0][dist.get_rank()]])
        return subject([weight], 1.0, sharded=True, group=group).item() if dist.get_rank() else None

    assert world.run(clip, world_size=3) == [None, 5.0, 5.0]


def weight_with(*values):
    weight = nn.Parameter(torch.ones(len(values)))
    weight.grad = torch.tensor(values)
    return weight


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("clip_grad_norm")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "needs max_norm above 0, got max_norm=0", lambda r: ([weight_with(1.0)], 0)),
        (ValueError, "needs max_norm above 0, got max_norm=nan", lambda r: ([weight_with(1.0)], math.nan)),
        (ValueError, "needs norm_type above 0, got norm_type=0", lambda r: ([weight_with(1.0)], 1.0, {"norm_type": 0})),
        (ValueError, "another max_norm on every rank: rank 0: 1, rank 1: 2", lambda r: ([weight_with(1.0)], 1.0 + r)),
        (ValueError, "got no parameter on any rank; pass a module, or a list", lambda r: ([], 1.0)),
        (ValueError, "their norms are rank 0: 1, rank 1: 2; synchronise", lambda r: ([weight_with(1.0 + r)], 1.0)),
        (
            ValueError,
            "a tensor in sharded that is not",
            lambda r: ([weight_with(1.0)], 1.0, {"sharded": [weight_with()]}),
        ),
        (
            ValueError,
            "a tensor in copies that is not",
            lambda r: ([weight_with(1.0)], 1.0, {"copies": [weight_with()]}),
        ),
        (
            ValueError,
            "needs the norms of all ranks where gradients are sharded; leave agree=True",
            lambda r: ([weight_with(1.0)], 1.0, {"sharded": True, "agree": False}),
        ),
        (TypeError, "takes a module or tensors, got int", lambda r: ([1], 1.0)),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_clip_grad_norm_refuses(subject, rank, error, message, call):
    parameters, max_norm, *keywords = call(rank)
    with pytest.raises(error, match=f"^clip_grad_norm .*{message}"):
        subject(parameters, max_norm, **dict(*keywords))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("clip_grad_norm")
@pytest.mark.world_size(2)
def test_the_norm_of_a_dtensor_counts_once(subject, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    def weight():
        placed = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
        placed.grad = distribute_tensor(torch.tensor([3.0, 0.0, 4.0, 0.0]), mesh, [Shard(0)])
        return placed

    mesh = init_device_mesh("cpu", (2,))
    own, dtensor = weight_with(12.0, 0.0), weight()
    assert subject([dtensor, own], 1.0).item() == pytest.approx(13)
    assert dtensor.grad.to_local()[0].item() == pytest.approx((3 + rank) / 13)
    assert own.grad[0].item() == pytest.approx(12 / 13)
    own = weight_with(12.0 * rank, 0.0)
    assert subject([weight(), own], 1.0, sharded=[own]).item() == pytest.approx(13)
    with pytest.raises(ValueError, match="clip_grad_norm got a DTensor as sharded, whose norm is that of all"):
        subject([weight(), own], 1.0, sharded=True)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("clip_grad_norm")
@pytest.mark.world_size(3)
def test_what_one_rank_may_not_do_is_refused_on_all(subject, rank):
    weight = weight_with(1.0)
    if rank == 2:
        weight.grad = weight.grad.to_sparse()
    with pytest.raises(ValueError, match=r"^clip_grad_norm .* layout torch.sparse_coo; build .* \(on rank 2\)$"):
        subject([weight], 1.0)
    weight.grad = torch.ones(1)
    assert subject([weight], 0.5).item() == 1.0  # the error left no message behind


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("clip_grad_norm")
@pytest.mark.world_size(2)
def test_a_rank_that_need_not_agree_is_refused_alone(subject, rank):
    weight = weight_with(1.0)
    if rank == 0:
        assert subject([weight], 0.5, agree=False).item() == 1.0
    else:
        with pytest.raises(ValueError, match=r"clip_grad_norm needs max_norm above 0, got max_norm=0$"):
            subject([weight], 0, agree=False)
