"""check_same_trajectory names the parameters whose gradients are missing from the norm that clips."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_same_trajectory

BATCHES = 3 * torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(11), dtype=torch.float64)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def steps_of(model, net, batches, clip, factor=1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        (factor * nn.functional.mse_loss(net(batch[:, :3]), batch[:, 3:])).backward()
        clip(model)
        optimizer.step()


def whole(model, max_norm=1.0):
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def plainly(model, steps):
    steps_of(model, model, BATCHES[:steps], whole)


def trained(clip, **more):
    def train(model, steps):
        own = BATCHES[:steps, dist.get_rank() :: dist.get_world_size()]
        steps_of(model, DistributedDataParallel(model), own, clip, **more)

    return train


def by_the_norm_without(*left_out, scales_all=True):
    def clip(model):
        kept = [one.grad for name, one in model.named_parameters() if name not in left_out]
        norm = torch.stack([grad.norm() for grad in kept]).norm()
        for grad in [one.grad for one in model.parameters()] if scales_all else kept:
            grad *= (1 / (norm + 1e-6)).clamp(max=1)

    return clip


@pytest.mark.parametrize(
    ("left_out", "names"),
    [
        (("0.weight",), "parameter '0.weight' is"),
        (("0.bias", "2.bias"), "parameter '0.bias' and 1 more are"),
        (("2.weight", "2.bias"), "parameter '2.weight' and 1 more are"),
    ],
)
@pytest.mark.parametrize("scales_all", [True, False])
def test_what_is_missing_from_the_norm_is_named(world, left_out, names, scales_all):
    words = "all gradients are .* times those of plainly" if scales_all else "those are not scaled, either"
    cause = (
        f"{names} missing from the norm that clips: without .* have the norm 1, to which plainly clips all .*{words}"
    )
    with pytest.raises(AssertionError, match=f"likely cause +{cause}\n"):
        check_same_trajectory(trained(by_the_norm_without(*left_out, scales_all=scales_all)), plainly, net, world)


@pytest.mark.parametrize(
    "subject",
    [
        trained(lambda model: None),
        trained(lambda model: whole(model, max_norm=1.5)),
        trained(lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.3)),
    ],
    ids=["nothing", "limit", "values"],
)
def test_no_parameter_is_named_where_another_clipping_is_wrong(world, subject):
    check_same_trajectory(trained(whole), plainly, net, world)
    with pytest.raises(AssertionError) as caught:
        check_same_trajectory(subject, plainly, net, world)
    assert "missing from the norm" not in str(caught.value)
    assert "a norm of its own" not in str(caught.value)


def test_parts_with_norms_of_their_own_are_named(world):
    subject = trained(lambda model: [whole(layer) for layer in (model[0], model[2])])
    cause = (
        "2 parts of the gradients have the norm 1 each, one of them is parameter '[02]..*': each part is clipped by a"
    )
    with pytest.raises(AssertionError, match=f"likely cause +{cause}"):
        check_same_trajectory(subject, plainly, net, world)
