"""What DistributedDataParallel wraps: the module inside, changes to it, models that it refuses."""

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

from .data_parallel_models import (
    TINY,
    Branches,
    alike,
    ddp,
    gradients,
    mean_gradients,
    net,
    plain_hook,
    require_close,
    samples,
    squared,
)

# -- the module inside, and changes to it -----------------------------------------------------------


@ddp
@pytest.mark.world_size(2)
def test_the_state_dict_has_the_prefix_of_torchs(subject):
    model = alike(Branches)
    ours, torchs = subject(model), TorchDistributedDataParallel(copy.deepcopy(model))
    assert ours.module is model
    assert list(ours.state_dict()) == list(torchs.state_dict())
    ours.load_state_dict(torchs.state_dict())
    model.load_state_dict({name.removeprefix("module."): value for name, value in ours.state_dict().items()})


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
    assert not other.training and not other.module.training
    assert len(other.calls) == 1 and not calls


@ddp
@pytest.mark.world_size(2)
def test_a_module_may_be_wrapped_anew(subject, rank):
    model = alike()

    def wrap_and_step():  # in a frame of its own, as who watches may keep what its variables held
        model.zero_grad()
        wrapped = subject(model)
        squared(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(2, squared))
        return len(model[0].weight._post_accumulate_grad_hooks)

    assert [wrap_and_step() for _ in range(3)] == [1, 1, 1]
    gc.collect()
    assert not model[0].weight._post_accumulate_grad_hooks


def replace(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


CHANGES = {
    "added": (lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(1))), "'extra' was added"),
    "a layer added": (lambda m: m.append(nn.Linear(1, 1).double()), "'3.weight' was added"),
    "replaced": (replace, "'0.weight' was replaced by another one"),
    "frozen": (lambda m: m[2].requires_grad_(False), "'2.weight' was frozen"),
    "unfrozen": (lambda m: m[2].bias.requires_grad_(True), "'2.bias' was unfrozen"),
    "cast": (lambda m: setattr(m[0].bias, "data", m[0].bias.data.float()), "'0.bias' was cast from torch.float64"),
    "resized": (lambda m: setattr(m[2].bias, "data", torch.zeros(1, 1).double()), r"'2.bias' was resized from \(1,\)"),
}


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("where", "find_unused"), [([0, 1], False), ([1], True)], ids=["everywhere", "on rank 1, unused ones found"]
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_wrapping_is_named_on_every_rank(subject, rank, change, where, find_unused):
    model = alike()
    model[2].bias.requires_grad_(change != "unfrozen")
    wrapped = subject(model, find_unused_parameters=find_unused, **TINY)
    squared(wrapped, rank).backward()
    model.zero_grad()
    change_it, named = CHANGES[change]
    if rank in where:
        change_it(model)
    if change == "cast":  # a model of two dtypes cannot run: what it computes does not matter here
        model[0].forward = lambda x: nn.functional.linear(x, model[0].weight, model[0].bias.double())
    ranks = "every rank" if len(where) == 2 else "rank 1"
    with pytest.raises(RuntimeError, match=f"^DistributedDataParallel: on {ranks}, parameter {named}.*; wrap"):
        squared(wrapped, rank).backward()


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("where", [[0, 1], [1]], ids=["everywhere", "on rank 1"])
def test_a_model_whose_parameters_are_all_replaced_is_seen(subject, rank, where):
    wrapped = subject(alike())
    if rank in where:
        wrapped.load_state_dict(wrapped.state_dict(), assign=True)
    ranks = "every rank" if len(where) == 2 else "rank 1"
    with pytest.raises(RuntimeError, match=f": on {ranks}, parameter '0.weight' was replaced by another one after"):
        squared(wrapped, rank).backward()


@ddp
@pytest.mark.world_size(2)
def test_a_call_with_other_parameters_is_no_change(subject, rank):
    model = alike()
    squared(model, rank).backward()
    own = gradients(model)
    model.zero_grad()
    wrapped = subject(model)
    others = {n: p.detach().clone().requires_grad_() for n, p in wrapped.named_parameters()}
    torch.func.functional_call(wrapped, others, (samples(rank),)).square().mean().backward()
    require_close({name.removeprefix("module."): p.grad for name, p in others.items()}, own)
    squared(wrapped, rank).backward()
    require_close(gradients(model), mean_gradients(2, squared))


@ddp
@pytest.mark.world_size(2)
def test_casting_the_whole_model_after_wrapping_is_seen(subject, rank):
    wrapped = subject(alike())
    wrapped.float()
    with pytest.raises(RuntimeError, match=r"'0.weight' was cast from torch.float64 to torch.float32 after wrapping"):
        wrapped(samples(rank).float()).sum().backward()


class Normed(nn.Sequential):
    """A buffer that forward needs, and one that it does not."""

    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("mark", torch.arange(2.0))


def set_buffer(model, name, value):
    model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = value


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("where", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("name", ["1.running_mean", "mark"])
def test_a_buffer_of_another_shape_is_named_on_every_rank(subject, rank, where, name):
    model = alike(Normed)
    wrapped = subject(model)
    if rank in where:
        set_buffer(model, name, torch.zeros(3).double())
    ranks = "every rank" if len(where) == 2 else f"rank {where[0]}"
    what = rf"buffer '{name}' was torch.float64 \(2,\) on cpu, it is torch.float64 \(3,\) on cpu now; wrap the module"
    with pytest.raises(RuntimeError, match=f"^DistributedDataParallel: on {ranks}, {what}"):
        squared(wrapped, rank).backward()


@ddp
@pytest.mark.world_size(2)
def test_a_buffer_that_one_rank_has_changed_keeps_no_other_from_evaluating(subject, rank):
    model = alike(Normed)
    wrapped = subject(model)
    if rank == 1:
        model.register_buffer("extra", torch.zeros(1))
    with torch.no_grad():
        if rank == 1:
            with pytest.raises(RuntimeError, match=r"'extra' was not there, it is torch.float32 \(1,\) on cpu"):
                wrapped(samples(0))
        else:
            wrapped(samples(0))


@ddp
@pytest.mark.world_size(2)
def test_a_change_by_which_forward_fails_on_one_rank_is_named_on_every_rank(subject, rank):
    model = alike()
    wrapped = subject(model)
    if rank == 1:
        model[0].float()
    with pytest.raises(RuntimeError, match=r": on rank 1, parameter '0.weight' was cast from torch.float64 to"):
        squared(wrapped, rank).backward()


@ddp
@pytest.mark.world_size(2)
def test_buffers_may_be_registered_anew_in_another_order(subject, rank):
    model = alike(Normed)
    model.register_buffer("other", torch.full((2,), 7.0).double())
    wrapped = subject(model)
    if rank == 1:
        mark = model.mark
        del model.mark
        model.register_buffer("mark", mark)
    wrapped(samples(rank))
    assert model.mark.tolist() == [0, 1] and model.other.tolist() == [7, 7]


@ddp
@pytest.mark.world_size(2)
def test_new_values_are_no_change(subject, rank):
    model = alike()
    wrapped = subject(model)
    for p in model.parameters():
        p.data = p.data.clone()
    squared(wrapped, rank).backward()
    require_close(gradients(model), mean_gradients(2, squared))


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
            self.register_buffer("short", torch.randint(0, 9, (3,), dtype=torch.int16))
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
    assert everyone[0] == everyone[1] and everyone[2] == everyone[3] and everyone[0] != everyone[2]


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
        (lambda rank: nn.Embedding(2, 2, sparse=True), r"on every rank, embedding '' makes sparse gradients"),
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
    squared(subject(model, broadcast_buffers=False), rank).backward()
    require_close(gradients(model), mean_gradients(2, squared))


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


@ddp
@pytest.mark.world_size(2)
def test_options_that_differ_are_refused(subject, rank):
    with pytest.raises(ValueError, match=r"got bucket_cap_mb=1 on rank 0 and bucket_cap_mb=2 on rank 1; pass the same"):
        subject(net(), bucket_cap_mb=1 + rank)


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
    wrapped = subject(model, [0], gradient_as_bucket_view=True, **TINY)
    for _ in range(3):
        model.zero_grad()
        squared_on_gpu = wrapped(samples(0).float()).square().mean()
        squared_on_gpu.backward()
    alone(samples(0).float().cuda()).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
