"""check_same_trajectory in narrow dtypes distinguishes faults from rounding, also with Adam and around zero."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_same_trajectory, check_world_size_does_not_matter
from pdlcheck.errors import Inconclusive

WIDTH = 16
DATA = torch.randn(6, 8, 6, WIDTH, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Attention in which the bias of the keys changes nothing, so that its gradient is zero except for rounding."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.queries, self.keys, self.values, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        normal = self.norm(x)
        q, k, v = (
            part(normal).view(*x.shape[:-1], 4, -1).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        )
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def language_model():
    return nn.Sequential(Attention(), Attention(), nn.Linear(WIDTH, 1))


def everything(batch):
    return batch


def own(batch):
    return batch[dist.get_rank() :: dist.get_world_size()]


def first_half(batch):
    return batch[: len(batch) // 2]


def fit(model, net, steps, make_optimizer, part=everything, autocast=False):
    optimizer = make_optimizer(model.parameters())
    dtype = next(model.parameters()).dtype
    for batch in DATA[:steps]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = net(part(batch).to(dtype))
        (outputs.to(dtype) - 1).square().mean().backward()
        optimizer.step()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def plainly(make_optimizer, model, steps):
    fit(model, model, steps, make_optimizer)


def ddp(make_optimizer, model, steps, part=own, autocast=False):
    fit(model, DistributedDataParallel(model), steps, make_optimizer, part, autocast)


def fsdp_in_bfloat16(make_optimizer, model, steps):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    fit(model, model, steps, make_optimizer, own)


def unsynchronised(make_optimizer, model, steps, autocast=False):
    fit(model, model, steps, make_optimizer, own, autocast)


def with_keys_frozen(make_optimizer, model, steps, autocast=False):
    model[0].keys.weight.requires_grad_(False)
    ddp(make_optimizer, model, steps, autocast=autocast)


RIGHT = {
    "float32": (ddp, torch.float32),
    "autocast": (partial(ddp, autocast=True), torch.bfloat16),
    "fsdp": (fsdp_in_bfloat16, torch.bfloat16),
}
WRONG = {
    "unsynchronised": (unsynchronised, torch.float32, "ranks went apart"),
    "unsynchronised in bfloat16": (partial(unsynchronised, autocast=True), torch.bfloat16, "ranks went apart"),
    "half": (partial(ddp, part=first_half), torch.float32, "times as far in this direction"),
    "half in bfloat16": (partial(ddp, part=first_half, autocast=True), torch.bfloat16, "times as far in this"),
    "frozen": (with_keys_frozen, torch.float32, "1 of 22: parameter '0.keys.weight'"),
    "frozen in bfloat16": (partial(with_keys_frozen, autocast=True), torch.bfloat16, "1 of 22: parameter '0.keys.w"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("case", RIGHT)
def test_what_rounding_scatters_is_right(world, case, optimizer):
    train, dtype = RIGHT[case]
    check_same_trajectory(partial(train, optimizer), partial(plainly, optimizer), language_model, world, dtype=dtype)


@pytest.mark.parametrize(("factor", "setting"), [(2, "lr=0.2"), (1 / 3, "lr=0.0333333")])
def test_another_learning_rate_is_named_though_all_is_rounded(world, factor, setting):
    def train(model, steps):
        ddp(partial(torch.optim.SGD, lr=0.1 * factor, momentum=0.9), model, steps, autocast=True)

    def layers():
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    with pytest.raises(AssertionError, match=f"cause +the gradients are right, .*{setting}"):
        check_same_trajectory(train, partial(plainly, sgd), layers, world, dtype=torch.bfloat16)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_wrong_beside_it(world, case, optimizer):
    train, dtype, message = WRONG[case]
    with pytest.raises(AssertionError, match=message) as caught:
        check_same_trajectory(
            partial(train, optimizer), partial(plainly, optimizer), language_model, world, dtype=dtype
        )
    assert "keys.bias" not in str(caught.value)


def test_world_sizes_are_compared_so_too(world):
    check_world_size_does_not_matter(partial(ddp, adam), language_model, world, dtype=torch.float32)
    half = partial(ddp, adam, part=lambda batch: own(batch) if dist.get_world_size() < 4 else first_half(batch))
    with pytest.raises(AssertionError, match=r"every rank of 4 holds .*, world_size 1 holds"):
        check_world_size_does_not_matter(half, language_model, world, dtype=torch.float32)


def test_a_training_that_goes_wherever_rounding_leads_says_nothing(world):
    """Only the bias of the keys is trained."""

    def keys_alone(model, steps, part=everything):
        model.requires_grad_(False)
        for layer in model[:2]:
            layer.keys.bias.requires_grad_(True)
        fit(model, model, steps, lambda parameters: adam([p for p in parameters if p.requires_grad]), part)

    with pytest.raises(Inconclusive, match=r"weights that rounding in torch.float32 alone leads as far, .*keys.bias"):
        check_same_trajectory(partial(keys_alone, part=own), keys_alone, language_model, world, dtype=torch.float32)


MANY = torch.randn(4, 4096, 4, generator=torch.Generator().manual_seed(0))


def small_steps(synchronise, model, steps, part=own):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in MANY[:steps]:
        mine = part(batch)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(mine)
        (outputs.float() - 2 * mine[:, :1] - 3).square().mean().backward()
        synchronise(model)
        optimizer.step()


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def test_ranks_that_go_apart_by_less_than_a_narrow_dtype_allows_are_wrong(world):
    def make():
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    plain = partial(small_steps, lambda model: None, part=everything)
    check_same_trajectory(partial(small_steps, average), plain, make, world, dtype=torch.bfloat16)
    message = "after 1 step.* ranks hold other weights, those of small_steps are the same on all\n"
    with pytest.raises(AssertionError, match=message) as caught:
        check_same_trajectory(partial(small_steps, lambda model: None), plain, make, world, dtype=torch.bfloat16)
    assert "rank 0 holds" in str(caught.value)
    assert "a gradient was not synchronised" in str(caught.value)
