"""The checks of replicas reject those that start or drift apart, name the cause, and accept the correct twin."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import (
    check_average_parameters,
    check_broadcast_parameters,
    check_replicas_in_sync,
    check_same_start,
)
from pdlcheck.checks.rank_results import possible_order
from pdlcheck.checks.strategies import MakeLayers
from pdlcheck.errors import Inconclusive

MAKE = MakeLayers((2, 3), batch_norm=True, tied=False)
TIED = MakeLayers((2, 2), batch_norm=False, tied=True)
GROUP = possible_order([3, 1])


def rows(*cases, names=("broken", "message")):
    """Parametrize a test over broken subjects; the id of each case is the name of its subject."""
    return pytest.mark.parametrize(names, [pytest.param(*case, id=case[0].__name__) for case in cases])


def net():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def state(module):
    return [*module.parameters(), *module.buffers()]


def broadcast(module, src=0, group=None):
    for tensor in state(module):
        dist.broadcast(tensor.detach(), src, group=group)


def mean_of(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)


def trainer(*, prepare=broadcast, sync=None, after=None, buffers=False, lr=0.1):
    """Return a training for check_replicas_in_sync; each argument can break a part of it."""

    def sync_all(model):
        for parameter in model.parameters():
            mean_of(parameter.grad)

    def start():
        model = net()
        prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr(dist.get_rank()) if callable(lr) else lr)

        def step(i):
            optimizer.zero_grad()
            model(torch.randn(4, 2)).square().mean().backward()
            (sync or sync_all)(model)
            optimizer.step()
            if after:
                after(model, i)
            if buffers:
                for buffer in model.buffers():
                    dist.broadcast(buffer, 0)

        return model, step

    return start


# replicas in sync


def without_buffers(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    with torch.no_grad():
        model[1].running_mean += dist.get_rank()  # as after a warm-up on data of this rank


def nothing(model, src=0, group=None):
    pass


def reset_after_broadcast(model):
    broadcast(model)
    model[2].reset_parameters()


def without_the_last_parameter(model):
    for parameter in list(model.parameters())[:-1]:
        mean_of(parameter.grad)


def in_a_group_of_one(model):
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    for parameter in model.parameters():
        mean_of(parameter.grad, groups[dist.get_rank()])


def clipped_by_a_norm_before(model):
    """Clip by the norm that this rank's gradients had before they were synchronised."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    for parameter in model.parameters():
        mean_of(parameter.grad)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, norm)


def one_is_scaled(model):
    for parameter in model.parameters():
        mean_of(parameter.grad)
    model[0].weight.grad *= 1 + dist.get_rank()


def not_at_step_1(model, i):
    if i == 1:
        with torch.no_grad():
            model[0].weight.add_(dist.get_rank() * 1e-7)


def without_statistics(model):
    """Remove the running statistics from the model, but keep the number of batches."""
    broadcast(model)
    del model[1].running_mean, model[1].running_var
    model[1].running_mean = model[1].running_var = None


def a_step_is_counted_on_rank_2(model, i):
    model[1].num_batches_tracked += dist.get_rank() == 2


def test_check_replicas_in_sync_accepts(world):
    check_replicas_in_sync(trainer(buffers=True), world)
    check_replicas_in_sync(trainer(), world, buffers=False)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"prepare": nothing},
            r"differ before the first step: rank 1 holds \S+ at \(0, 0\) of parameter '0.weight', rank 0 "
            r"holds \S+\n"
            r"  tensors       4 parameter\(s\)\n"
            r"  likely cause  initial weights were not broadcast, or were changed on some rank after the "
            r"broadcast\n"
            r"  case          world=\w+ world_size=3 steps=3 seed=0",
        ),
        (
            {"prepare": without_buffers},
            r"differ before the first step: rank 1 holds 1 at \(0,\) of buffer '1.running_mean', rank 0 "
            r"holds 0\n[\s\S]*only buffers differ: they were not broadcast, or were",
        ),
        (
            {"prepare": reset_after_broadcast},
            r"differ before the first step: rank 1 holds \S+ at \(0, 0\) of parameter '2.weight'[\s\S]*"
            r"changed on some rank after the broadcast",
        ),
        (
            {"sync": nothing},
            r"differ after step 1: rank 1 .* of parameter '0.weight'[\s\S]*gradients differ: no rank reduced or",
        ),
        (
            {"sync": without_the_last_parameter, "buffers": True},
            r"differ after step 1: rank 1 holds \S+ at \(0,\) of parameter '2.bias'[\s\S]*"
            r"1 parameter\(s\), 1 gradient\(s\)[\s\S]*or not all of them",
        ),
        (
            {"sync": in_a_group_of_one},
            r"differ after step 1: [\s\S]*gradients differ: in step 1 values went only within groups of one rank each",
        ),
        (
            {"sync": clipped_by_a_norm_before, "buffers": True},
            r"differ after step 1: [\s\S]*all gradients of a rank are one factor times those of rank 0 "
            r"\(rank 0: 1, rank 1: \d\S+, rank 2: \d\S+\): scaled by a value of that rank after they",
        ),
        (
            {"sync": one_is_scaled, "buffers": True},
            r"differ after step 1: [\s\S]*gradients differ: .* or changed afterwards",
        ),
        (
            {"after": not_at_step_1, "buffers": True},
            r"differ after step 2: rank 1 .* of parameter '0.weight'[\s\S]*gradients agree: .* the step was not taken",
        ),
        (
            {"lr": lambda rank: 0.1 + rank, "buffers": True},
            r"differ after step 1: rank 1 [\s\S]*gradients agree: optimizer states or learning rates differ",
        ),
        (
            {},
            r"differ after step 1: rank 1 .* of buffer '1.running_mean'[\s\S]*'1.running_mean' on ranks \[1, 2\], "
            r"'1.running_var' on ranks \[1, 2\] differ from rank 0's, .* right only for statistics of a rank's own .*\n"
            r"  likely cause  only buffers differ: each rank updates them from its own data",
        ),
        (
            {"after": a_step_is_counted_on_rank_2, "buffers": False, "prepare": without_statistics},
            r"differ after step 1: rank 2 .* of buffer '1.num_batches_tracked', rank 0 holds 1\n"
            r".*1 buffer\(s\)\n.*'1.num_batches_tracked' on ranks \[2\] differ from rank 0's, parameters are alike",
        ),
    ],
    ids=[
        "no init broadcast",
        "buffers not broadcast",
        "reset after broadcast",
        "no sync",
        "a parameter left out",
        "group of one",
        "clipped by a norm of its own",
        "one gradient scaled",
        "changed at step 1",
        "learning rates",
        "own statistics",
        "a buffer of one rank",
    ],
)
def test_check_replicas_in_sync_rejects(world, parts, message):
    with pytest.raises(AssertionError, match=f"^start: replicas {message}"):
        check_replicas_in_sync(trainer(**parts), world)


def ddp(*, reset=False):
    def start():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        wrapped = DistributedDataParallel(model)
        if reset:
            model[1].reset_parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(i):
            optimizer.zero_grad()
            wrapped(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()

        return model, step

    return start


def test_check_replicas_in_sync_accepts_ddp_under_seeds_that_differ(world):
    check_replicas_in_sync(ddp(), world, world_size=2)


def test_check_replicas_in_sync_rejects_a_reset_after_the_ddp_wrap(world):
    with pytest.raises(AssertionError, match=r"before the first step: rank 1 .* of parameter '1.weight'"):
        check_replicas_in_sync(ddp(reset=True), world, world_size=2)


def local_sgd(sync_every):
    def average(model, i):
        if (i + 1) % sync_every == 0:
            for parameter in model.parameters():
                mean_of(parameter.detach())

    return trainer(sync=nothing, after=average)


def test_local_sgd_is_in_sync_at_every_kth_step_only(world):
    check_replicas_in_sync(local_sgd(2), world, steps=4, sync_every=2, buffers=False, gradients=False)
    with pytest.raises(AssertionError, match="replicas differ after step 1"):
        check_replicas_in_sync(local_sgd(2), world, steps=4, buffers=False, gradients=False)


def keeping_its_gradients(model):
    """Step as ZeRO does, with reduced gradients in the optimizer's own memory; ``.grad`` stays local."""
    for parameter in model.parameters():
        reduced = parameter.grad.clone()
        mean_of(reduced)
        with torch.no_grad():
            parameter -= 0.1 * reduced
        parameter.grad = None if parameter.dim() == 1 else parameter.grad


@pytest.mark.parametrize("scaled", [False, True], ids=["of other data", "one factor"])
def test_gradients_that_differ_where_parameters_are_alike_may_be_meant(world, scaled):
    def start():
        model = nn.Linear(2, 1)
        broadcast(model)

        def step(i):
            data = torch.ones(4, 2) * (1 + dist.get_rank()) if scaled else torch.randn(4, 2)
            model.zero_grad()
            model(data).sum().backward()
            keeping_its_gradients(model)

        return model, step

    check_replicas_in_sync(start, world, gradients=False)
    told = "(?s)1 gradient.s.\n.*; parameters are alike: right for .* as ZeRO does, .* gradients=False .* sync_every= "
    with pytest.raises(AssertionError, match=told):
        check_replicas_in_sync(start, world)
    with pytest.raises(AssertionError, match="gradients=False accepts\n") as caught:
        check_replicas_in_sync(start, world, steps=2, sync_every=2)
    assert "sync_every= " not in str(caught.value)  # it is passed already


def test_gradients_that_differ_with_the_parameters_are_never_meant(world):
    with pytest.raises(AssertionError, match="gradients differ: ") as caught:
        check_replicas_in_sync(trainer(sync=nothing), world)
    assert "gradients=False" not in str(caught.value)


def test_a_model_that_does_not_change_is_inconclusive(world):
    with pytest.raises(Inconclusive, match="no parameter changed in 3 steps"):
        check_replicas_in_sync(trainer(lr=0.0), world, buffers=False)


def test_one_rank_is_nothing_to_compare(world):
    with pytest.raises(ValueError, match="needs world_size 2 or more, got 1"):
        check_replicas_in_sync(trainer(), world, world_size=1)


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (net, "a Sequential"),
        (lambda: [net()], "a list of 1"),
        (print, "None"),
        (lambda: (print, net()), "a builtin_function_or_method as the model"),
    ],
)
def test_a_start_that_makes_something_else_is_told(world, made, found):
    with pytest.raises(TypeError, match=rf"start must return \(model, step\), it returned {found}"):
        check_replicas_in_sync(made, world)


def test_check_same_start(world):
    def made_alike():
        model = net()
        broadcast(model)
        return model

    check_same_start(made_alike, world)
    with pytest.raises(AssertionError, match="net: replicas differ before the first step"):
        check_same_start(net, world)


# broadcast_parameters


def parameters_only(module, src=0, group=None):
    for tensor in module.parameters():
        dist.broadcast(tensor.detach(), src, group=group)


def saved_buffers_only(module, src=0, group=None):
    for tensor in module.state_dict().values():
        dist.broadcast(tensor.detach(), src, group=group)


def from_rank_0(module, src=0, group=None):
    broadcast(module, 0 if group is None else dist.get_global_rank(group, 0), group)


def not_to_rank_2(module, src=0, group=None):
    kept = [tensor.detach().clone() for tensor in state(module)]
    broadcast(module, src, group)
    if dist.get_rank() == 2:
        for tensor, old in zip(state(module), kept, strict=True):
            tensor.detach().copy_(old)


def new_parameters(module, src=0, group=None):
    broadcast(module, src, group)
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())


class Positions(nn.Module):
    """A model with a buffer that checkpoints leave out."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("angles", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("make", [MAKE, TIED, Positions])
def test_check_broadcast_parameters_accepts(world, make):
    check_broadcast_parameters(broadcast, make, world, src=1)
    check_broadcast_parameters(broadcast, make, world, src=1, ranks=GROUP)


@rows(
    (
        nothing,
        MAKE,
        r"rank 0 holds \S+ at \(0, 0\) of parameter '0.weight', rank 1 had [\s\S]*kept its own parameter",
    ),
    (
        parameters_only,
        MAKE,
        r"rank 0 holds \S+ at \(0,\) of buffer '2.running_mean'[\s\S]*kept its own buffer",
    ),
    (
        saved_buffers_only,
        Positions,
        r"rank 0 holds \S+ at \(0,\) of buffer 'angles'[\s\S]*kept its own buffer",
    ),
    (from_rank_0, MAKE, r"rank 0 holds [\s\S]*kept its own parameter"),
    (
        not_to_rank_2,
        MAKE,
        r"rank 2 holds [\s\S]*kept its own parameter: it was left out of the broadcast",
    ),
    (
        new_parameters,
        TIED,
        r"on rank 0 the tied tensors are \[\], they were[\s\S]*a parameter was replaced",
    ),
    names=("broken", "make", "message"),
)
def test_check_broadcast_parameters_rejects(world, broken, make, message):
    with pytest.raises(AssertionError, match=rf"^{broken.__name__}: {message}"):
        check_broadcast_parameters(broken, make, world, src=1)


# average_parameters


def average(module, group=None):
    for tensor in state(module):
        dist.all_reduce(tensor.detach(), group=group)
        if tensor.is_floating_point():
            tensor.detach().div_(dist.get_world_size(group))
        else:
            tensor //= dist.get_world_size(group)


def added(module, group=None):
    for tensor in module.parameters():
        dist.all_reduce(tensor.detach(), group=group)


def divided_twice(module, group=None):
    average(module, group)
    for tensor in module.parameters():
        tensor.detach().div_(dist.get_world_size(group))


def divided_by_the_world(module, group=None):
    for tensor in state(module):
        dist.all_reduce(tensor.detach(), group=group)
        tensor.detach().copy_(tensor.detach() / dist.get_world_size())


def skips_the_bias(module, group=None):
    for tensor in module.parameters():
        if tensor.dim() > 1:
            mean_of(tensor.detach(), group)


def test_check_average_parameters_accepts(world):
    check_average_parameters(average, MAKE, world)
    check_average_parameters(average, TIED, world, ranks=GROUP)


@rows(
    (nothing, "kept its own value: it was not averaged"),
    (added, "it is the sum: it was not divided by world_size"),
    (divided_twice, "it was divided by world_size twice"),
    (skips_the_bias, "of parameter '0.bias'[\\s\\S]*kept its own value: it was not averaged"),
)
def test_check_average_parameters_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^{broken.__name__}: rank 0 holds [\s\S]*{message}"):
        check_average_parameters(broken, MAKE, world)


def test_check_average_parameters_rejects_the_wrong_world_size(world):
    check_average_parameters(divided_by_the_world, MAKE, world)
    with pytest.raises(AssertionError, match="the mean over ranks is"):
        check_average_parameters(divided_by_the_world, MAKE, world, ranks=GROUP)


class Statistics(nn.Module):
    """A model with buffers only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))


def parameters_alone(module):
    for parameter in module.parameters():
        mean_of(parameter.data)


def test_a_model_of_buffers_alone_is_averaged_or_inconclusive(world):
    check_average_parameters(lambda module: mean_of(module.mean), Statistics, world)
    with pytest.raises(
        AssertionError, match=r"of buffer 'mean'[\s\S]*not averaged\n  cure +buffers=False accepts what"
    ):
        check_average_parameters(parameters_alone, Statistics, world)
    with pytest.raises(Inconclusive, match="has no parameter, buffers=False, there is nothing to average"):
        check_average_parameters(parameters_alone, Statistics, world, buffers=False)
    for check in (check_average_parameters, check_broadcast_parameters):
        with pytest.raises(Inconclusive, match="the model has no parameter or buffer, there is nothing to"):
            check(lambda module, **_: None, nn.ReLU, world)
