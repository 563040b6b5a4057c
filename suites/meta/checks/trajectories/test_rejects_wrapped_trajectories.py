"""check_same_trajectory on trainings that replace layers by other modules, make new ones, or warm up."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from pdlcheck.checks import check_same_trajectory, check_world_size_does_not_matter
from pdlcheck.errors import Inconclusive

DATA = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0))


def make():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def own(batch):
    return batch[dist.get_rank() :: dist.get_world_size()]


def everything(batch):
    return batch


def fit(model, steps, part=own, *, net=None, synchronise=None, lr=1e-3, schedule=None):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    warm_up = None if schedule is None else torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    dtype = next(model.parameters()).dtype
    for batch in DATA[:steps]:
        optimizer.zero_grad()
        ((net or model)(part(batch).to(dtype)) - 1).square().mean().backward()
        for parameter in model.parameters():
            if synchronise is not None and parameter.grad is not None:
                synchronise(parameter.grad)
        optimizer.step()
        if warm_up is not None:
            warm_up.step()


def average(gradient):
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def add(gradient):
    dist.all_reduce(gradient)


def never(gradient):
    pass


def plainly(model, steps):
    fit(model, steps, everything)


def recompute(model):
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))


def compile_layers(model):
    for place in (0, 2):
        model[place] = torch.compile(model[place], backend="eager")


WRAPS = {"recomputed": recompute, "compiled": compile_layers}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile reads it
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("shard", [DistributedDataParallel, fully_shard])
def test_layers_that_are_wrapped_in_their_places_keep_their_names(world, wrap, shard):
    def train(model, steps):
        wrap(model)
        fit(model, steps, net=shard(model))

    check_same_trajectory(train, plainly, make, world)
    if shard is DistributedDataParallel:
        check_world_size_does_not_matter(train, make, world)


@pytest.mark.parametrize("kind", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_layers_with_parametrized_weights_are_sent_to_the_ranks(world, kind):
    def layers():
        return nn.Sequential(kind(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))

    def train(model, steps, synchronise=average):
        fit(model, steps, synchronise=synchronise)

    check_same_trajectory(train, plainly, layers, world)
    with pytest.raises(AssertionError, match="as world_size is 2: gradients are summed"):
        check_same_trajectory(partial(train, synchronise=add), plainly, layers, world)


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        dtype = layer.weight.dtype
        draws = torch.Generator().manual_seed(layer.in_features)
        self.down = nn.Parameter(torch.randn(2, layer.in_features, generator=draws).to(dtype))
        self.up = nn.Parameter(torch.randn(layer.out_features, 2, generator=draws).to(dtype))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


def adapt(model):
    for place in (0, 2):
        model[place] = Adapted(model[place])


MADE = {"recomputed": recompute, "adapted": adapt}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@pytest.mark.parametrize("change", MADE.values(), ids=MADE)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_steps_are_small_beside_weights_also_where_both_trainings_change_the_model(world, change, dtype):
    """Regression test: bfloat16 allowed a tenth of a weight without an initial value, which hid every fault."""

    def plain(model, steps):
        change(model)
        fit(model, steps, everything)

    def trained(synchronise, model, steps):
        change(model)
        fit(model, steps, synchronise=synchronise)

    check_same_trajectory(partial(trained, average), plain, make, world, dtype=dtype)
    with pytest.raises(AssertionError, match="gradients are summed, not averaged"):
        check_same_trajectory(partial(trained, add), plain, make, world, dtype=dtype)
    with pytest.raises(AssertionError, match="ranks went apart"):
        check_same_trajectory(partial(trained, never), plain, make, world, dtype=dtype)


def test_how_far_a_new_tensor_went_must_be_known(world):
    def at_least_once(model, steps):
        adapt(model)
        if steps < 1:
            raise ValueError("no epochs")
        fit(model, steps, everything)

    with pytest.raises(
        Inconclusive, match=r"at_least_once makes parameter '0.down', .*\(model, 0\) .*Error: no epochs"
    ):
        check_same_trajectory(at_least_once, at_least_once, make, world)


def test_another_name_is_told(world):
    def renames(model, steps):
        model[0] = nn.Sequential(model[0])
        fit(model, steps, synchronise=average)

    with pytest.raises(AssertionError, match=r"has no parameter '0.weight'[^$]*instead +parameter '0.0.weight'"):
        check_same_trajectory(renames, plainly, make, world)


def warm(step):
    return min(1.0, step / 2)


def test_the_first_step_of_a_warm_up_moves_nothing(world):
    """The schedules of transformers begin in this way."""
    plain = partial(fit, part=everything, schedule=warm)
    check_same_trajectory(partial(fit, synchronise=average, schedule=warm), plain, make, world)
    with pytest.raises(AssertionError, match=r"after 2 step\(s\) rank 0"):
        check_same_trajectory(partial(fit, synchronise=add, schedule=warm), plain, make, world)
    with pytest.raises(AssertionError, match=r"after 1 step\(s\) rank 0"):
        check_same_trajectory(partial(fit, synchronise=average), plain, make, world)
    with pytest.raises(Inconclusive, match=r"holds the weights that it started with after 4 step\(s\)"):
        check_same_trajectory(partial(fit, lr=0.0), partial(fit, part=everything, lr=0.0), make, world)


class Gated(nn.Module):
    """A layer with a branch that no sample uses, and branches that some micro-batches do not use."""

    def __init__(self):
        super().__init__()
        self.body, self.branches = nn.Linear(4, 2), nn.ModuleList(nn.Linear(2, 1) for _ in range(3))

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        total = hidden.sum(1, keepdim=True)
        for branch, mine in zip(self.branches, (x[:, :1] > 0, x[:, :1] < 0), strict=False):
            if mine.any():
                total = total + branch(hidden) * mine
        return total


def accumulated(model, steps, shares=2):
    ddp, optimizer = (
        DistributedDataParallel(model, find_unused_parameters=True),
        torch.optim.SGD(model.parameters(), 0.1),
    )
    for batch in DATA[:steps].double():
        optimizer.zero_grad()
        first, last = own(batch).chunk(2)
        with ddp.no_sync():
            ((ddp(first) - 1).square().mean() / shares).backward()
        ((ddp(last) - 1).square().mean() / shares).backward()
        optimizer.step()


def plainly_with(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in DATA[:steps].double():
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()


def test_unused_parameters_may_accumulate_without_sync(world):
    check_same_trajectory(accumulated, plainly_with, Gated, world)
    with pytest.raises(AssertionError, match="likely cause"):
        check_same_trajectory(partial(accumulated, shares=1), plainly_with, Gated, world)
