"""DistributedDataParallel wraps a module, and refuses some models."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from .models import (
    TINY,
    Branches,
    alike,
    ddp,
    fitting,
    gradients,
    mean_gradients,
    net,
    plain_hook,
    require_close,
    samples,
    squared,
)

# -- the module inside -----------------------------------------------------------


@ddp
@pytest.mark.world_size(2)
def test_the_state_dict_has_the_prefix_of_torchs(subject):
    model = alike(Branches)
    ours, torchs = subject(model), TorchDistributedDataParallel(copy.deepcopy(model))
    assert ours.module is model
    assert list(ours.state_dict()) == list(torchs.state_dict())
    ours.load_state_dict(torchs.state_dict())
    model.load_state_dict({name.removeprefix("module."): value for name, value in ours.state_dict().items()})


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
def test_a_copy_is_a_wrapper_of_its_own_and_pickling_is_refused(subject, rank):
    wrapped = subject(alike(), gradient_as_bucket_view=True)
    squared(wrapped, rank).backward()
    before = gradients(wrapped.module)
    other = copy.deepcopy(wrapped)
    other.zero_grad()
    squared(other, rank + 2).backward()
    require_close(gradients(other.module), mean_gradients(2, lambda m, r: squared(m, r + 2)))
    require_close(gradients(wrapped.module), before)
    with pytest.raises(TypeError, match=r"holds a process group, which cannot be pickled; save .module or its state"):
        pickle.dumps(wrapped)
    wrapped.register_comm_hook(None, plain_hook)
    with pytest.raises(TypeError, match=r"state that cannot be copied; copy its .module"):
        copy.deepcopy(wrapped)


@ddp
@pytest.mark.world_size(2)
def test_a_copy_has_the_mode_the_hooks_and_the_attributes_of_the_wrapper(subject):
    wrapped = subject(alike()).eval()
    calls = wrapped.calls = []
    wrapped.register_forward_hook(lambda module, inputs, output: module.calls.append(output))
    other = copy.deepcopy(wrapped)
    other(samples(0))
    assert not other.training
    assert not other.module.training
    assert len(other.calls) == 1
    assert not calls


@pytest.mark.beyond_contract("hooks on parameters that go with the wrapper")
@ddp
@pytest.mark.world_size(2)
def test_a_module_may_be_wrapped_anew(subject, rank):
    model = alike()

    def wrap_and_step():  # in its own frame, because a debugger or tracer may keep the variables of a frame alive
        model.zero_grad()
        wrapped = subject(model)
        squared(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(2, squared))
        return len(model[0].weight._post_accumulate_grad_hooks)

    assert [wrap_and_step() for _ in range(3)] == [1, 1, 1]
    gc.collect()
    assert not model[0].weight._post_accumulate_grad_hooks


@ddp
@pytest.mark.world_size(2)
def test_what_the_module_says_is_to_be_ignored_is_left_alone(subject, rank):
    model = alike()
    model._ddp_params_and_buffers_to_ignore = ["2.bias"]
    with torch.no_grad():
        model[2].bias.fill_(rank)
    wrapped = subject(model)
    assert model[2].bias.item() == rank
    wrapped(samples(0) * (rank + 1)).mean().backward()
    assert model[2].bias.grad.item() == 1
    everyone = [None, None]
    dist.all_gather_object(everyone, model[0].weight.grad.tolist())
    assert everyone[0] == everyone[1]


# -- construction -----------------------------------------------------------------------------------


@ddp
@pytest.mark.world_size(2, 3)
def test_everything_starts_as_on_rank_0(subject, rank):
    class Everything(nn.Module):
        def __init__(self):
            super().__init__()
            self.half, self.norm = nn.Linear(2, 2).half(), nn.BatchNorm1d(3)
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
            self.register_buffer("mask", torch.rand(5) < 0.5)
            self.register_buffer("angles", torch.randn(2, 2, dtype=torch.cfloat), persistent=False)
            self.register_buffer("nothing", None)
            self.register_buffer("empty", torch.ones(0))
            self.register_buffer("turned", torch.randn(2, 3).T)

    torch.manual_seed(rank)
    model = Everything()
    tensors = [*model.parameters(), *model.buffers()]
    before = [t.detach().tolist() for t in tensors]
    subject(model)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, before)
    assert [t.detach().tolist() for t in tensors] == everyone[0]


@pytest.mark.beyond_contract("dtypes that torch's collectives refuse on gloo")
@ddp
@pytest.mark.world_size(2)
def test_int16_starts_as_on_rank_0(subject, rank):
    model = nn.Linear(2, 2)
    model.register_buffer("short", torch.tensor([rank, 300], dtype=torch.int16))
    subject(model)
    assert model.short.tolist() == [0, 300]


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("options", "at_first", "later"),
    [
        ({}, 0.0, 10.0),
        ({"broadcast_buffers": None}, 0.0, 10.0),
        ({"broadcast_buffers": False}, None, None),
        ({"forward_sync_buffers": False}, 0.0, None),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, 0.0, 10.0),
    ],
    ids=["default", "torch's default", "never", "once", "always"],
)
def test_buffers_are_taken_at_construction_and_in_forward_passes(subject, rank, options, at_first, later):
    model = net()
    model.register_buffer("mark", torch.tensor(float(rank)))
    wrapped = subject(model, **options)
    assert model.mark.item() == (rank if at_first is None else at_first)
    model.mark.fill_(10.0 + rank)
    wrapped(torch.ones(1, 2)).sum().backward()
    assert model.mark.item() == (10.0 + rank if later is None else later)


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(4)
def test_replicas_may_be_a_dimension_of_a_mesh(subject, rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = alike()
    squared(subject(model, device_mesh=mesh["replicate"]), rank // 2).backward()
    require_close(gradients(model), mean_gradients(2, squared))
    with pytest.raises(ValueError, match="takes a device_mesh of one dimension, got 2; pass the part"):
        subject(model, device_mesh=mesh)
    with pytest.raises(ValueError, match="takes process_group or device_mesh, got both"):
        subject(model, device_mesh=mesh["shard"], process_group=dist.group.WORLD)


@ddp
@pytest.mark.world_size(4)
def test_groups_are_independent(subject, rank):
    groups = [dist.new_group([2 * half, 2 * half + 1]) for half in range(2)]
    torch.manual_seed(rank)
    model = net().double()
    wrapped = subject(model, process_group=groups[rank // 2])
    squared(wrapped, rank).backward()
    everyone = [None] * 4
    dist.all_gather_object(everyone, [model[0].weight.tolist(), model[0].weight.grad.tolist()])
    assert everyone[0] == everyone[1]
    assert everyone[2] == everyone[3]
    assert everyone[0] != everyone[2]


@ddp
@pytest.mark.world_size(1)
def test_a_world_of_one(subject):
    model = alike()
    wrapped = subject(model, gradient_as_bucket_view=True)
    squared(wrapped, 0).backward()
    require_close(gradients(model), mean_gradients(1, squared))


def other_shape(rank):
    return nn.Linear(2, 3 if rank else 2)


def other_dtype(rank):
    return nn.Linear(2, 2).to(torch.float64 if rank else torch.float32)


def other_order(rank):
    parts = [("a", nn.Linear(2, 2)), ("b", nn.Linear(2, 2))]
    return nn.ModuleDict(parts[::-1] if rank else parts)


def other_strides(rank):
    return nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last if rank else torch.contiguous_format)


def other_frozen(rank):
    return nn.Linear(2, 2).requires_grad_(not rank) if rank else nn.Linear(2, 2)


def half_frozen(rank):
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(not rank)
    return model


def more_layers(rank):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank)))


def other_buffer(rank):
    return nn.BatchNorm1d(2, track_running_stats=not rank)


def expanded_buffer(rank):
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1, 1, dtype=torch.bool).expand(3, 2) if rank else torch.ones(3, 2) > 0)
    return model


def in_tensor_parallel(rank):
    model = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (2,))
    model.bias = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    return model


def lazy(rank):
    return nn.LazyLinear(2) if rank else nn.Linear(2, 2)


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_shape, r"tensor 0 is 'weight' torch.float32 \(2, 2\) .* on rank 0, 'weight' torch.float32 \(3, 2\)"),
        (other_dtype, r"tensor 0 is 'weight' torch.float32 \(2, 2\) .* 'weight' torch.float64 \(2, 2\) .* on rank 1"),
        (other_order, r"tensor 0 is 'a.weight' .* on rank 0, 'b.weight' .* on rank 1; make it in the same way"),
        (other_strides, r"'weight' torch.float32 \(2, 2, 2, 2\) .* with strides .* on rank 1"),
        (half_frozen, r"that requires a gradient on rank 0, 'weight' torch.float32 \(2, 2\) on cpu on rank 1"),
        (more_layers, r"tensor 2 is nothing on rank 0, '1.weight' .* on rank 1"),
        (other_buffer, r"tensor 2 is 'running_mean' .* on rank 0, nothing on rank 1"),
        (in_tensor_parallel, r"on every rank, needs tensors that each rank holds whole, 'bias' is a DTensor; torch's"),
        (lazy, r"on rank 1, got 'weight', which has no shape yet; run one forward pass first"),
        (expanded_buffer, r"on rank 1, got 'mask', an expanded tensor, .* share memory; replace it by its .clone\(\)"),
        (other_frozen, r"on rank 1, Linear has no parameter that requires a gradient; use it as it is"),
        (lambda rank: nn.ReLU(), r"on every rank, ReLU has no parameter that requires a gradient"),
        (lambda rank: nn.Linear(2, 2, device="meta"), r"on every rank, got 'weight' on device meta"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_that_do_not_fit_are_refused_alike_on_every_rank(subject, rank, make, message):
    with pytest.raises(ValueError, match=rf"^DistributedDataParallel\b.*{message}") as caught:
        subject(make(rank))
    everyone = [None, None]
    dist.all_gather_object(everyone, str(caught.value))
    assert everyone[0] == everyone[1]


@ddp
@pytest.mark.world_size(2)
def test_an_expanded_buffer_that_nobody_overwrites_is_taken(subject, rank):
    model = alike()
    model.register_buffer("mask", torch.ones(1).expand(3))
    wrapped = subject(model, broadcast_buffers=False)
    squared(wrapped, rank).backward()
    require_close(gradients(model), mean_gradients(2, squared))


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "option",
    [{"bucket_cap_mb": 0}, {"reduce_dtype": torch.int8}, {"device_ids": [0, 1]}],
    ids=lambda option: next(iter(option)),
)
def test_an_option_that_is_wrong_on_one_rank_is_refused_on_all(subject, rank, option):
    with pytest.raises(ValueError, match=f"on rank 1, it .*{next(iter(option))}="):
        subject(net(), **(option if rank else {}))


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
def test_options_that_differ_are_refused(subject, rank):
    with pytest.raises(ValueError, match=r"got bucket_cap_mb=1 on rank 0 and bucket_cap_mb=2 on rank 1; pass the same"):
        subject(net(), bucket_cap_mb=1 + rank)


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_cap_mb": 0}, "needs a positive bucket_cap_mb, got bucket_cap_mb=0"),
        ({"first_bucket_mb": -1}, "needs a positive first_bucket_mb, got first_bucket_mb=-1"),
        ({"device_ids": [0, 1]}, r"serves one device in a process, got device_ids=\[0, 1\]; start more ranks"),
        ({"reduce_dtype": torch.int32}, "sums in a floating dtype, got reduce_dtype=torch.int32"),
        (
            {"reduce_dtype": torch.float32, "gradient_as_bucket_view": True},
            "the gradient of 'weight', torch.bfloat16, cannot be a view of a bucket of torch.float32",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_are_refused(subject, options, message):
    with pytest.raises(ValueError, match=f"DistributedDataParallel.* {message}"):
        subject(nn.Linear(2, 2).bfloat16(), **options)


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
def test_only_modules_are_wrapped(subject):
    with pytest.raises(TypeError, match=r"DistributedDataParallel takes a torch.nn.Module, got function"):
        subject(net)


def test_there_must_be_a_process_group():
    from pdlcheck.primitives import DistributedDataParallel

    with pytest.raises(ValueError, match="DistributedDataParallel needs a process group"):
        DistributedDataParallel(net())


@ddp
@pytest.mark.gpu
@pytest.mark.world_size(1)
def test_it_trains_on_a_gpu(subject):
    if dist.get_backend() != "nccl":
        pytest.skip("needs ranks on nccl; run it with --world nccl")
    torch.manual_seed(0)
    model = net().cuda()
    alone = copy.deepcopy(model)
    wrapped = subject(model, [0], gradient_as_bucket_view=True, **fitting(subject, TINY))
    for _ in range(3):
        model.zero_grad()
        squared_on_gpu = wrapped(samples(0).float()).square().mean()
        squared_on_gpu.backward()
    alone(samples(0).float().cuda()).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
