"""DistributedDataParallel has the arguments and attributes of torch's, or raises an error that names them."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from .models import Branches, alike, ddp, gradients, mean_gradients, plain_hook, require_close, squared

# attributes of torch's that ours lacks
ABSENT = {
    "broadcast_bucket_size": "buffers travel in one message",
    "finalize_backward": "a pass of ours has ended when backward returns",
    "gather": "of the time when one process served several devices",
    "logger": "an object of torch's C++ code",
    "reducer": "an object of torch's C++ code",
    "require_manual_backward_finalization": "a pass of ours has ended when backward returns",
    "scatter": "of the time when one process served several devices",
    "should_finalize_after_backward": "a pass of ours has ended when backward returns",
    "to_kwargs": "of the time when one process served several devices",
    "use_side_stream_for_tensor_copies": "inputs move on the current stream",
    "will_sync_module_buffers": "forward_sync_buffers and require_forward_param_sync decide",
}


def torchs(module, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has renamed broadcast_buffers
        return TorchDistributedDataParallel(module, **options)


@ddp
def test_the_arguments_of_torchs_come_first_in_its_order(subject):
    theirs = list(inspect.signature(TorchDistributedDataParallel).parameters)
    assert list(inspect.signature(subject).parameters)[: len(theirs)] == theirs


@ddp
@pytest.mark.world_size(2)
def test_the_defaults_of_torchs_are_taken(subject, rank):
    parameters = list(inspect.signature(TorchDistributedDataParallel).parameters.values())[1:]
    model = alike()
    wrapped = subject(model, *[p.default for p in parameters])
    squared(wrapped, rank).backward()
    require_close(gradients(model), mean_gradients(2, squared))


def shown(value):
    return value if isinstance(value, bool | int | str | list | set | type(None) | torch.device) else None


@pytest.mark.beyond_contract("attributes of torch's, and those that are missing")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 1, "broadcast_buffers": False, "find_unused_parameters": True}, {"static_graph": True}],
    ids=["default", "others", "static graph"],
)
def test_public_attributes_are_those_of_torchs(subject, options):
    def model():
        made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        made._ddp_params_and_buffers_to_ignore = ["1.bias"]
        return made

    ours, other = subject(model(), **options), torchs(model(), **options)
    there, here = ({name for name in dir(one) if not name.startswith("_")} for one in (other, ours))
    assert there - here <= ABSENT.keys()
    assert not here & ABSENT.keys()
    for name in there & here - {"modules_buffers"}:
        assert shown(getattr(ours, name)) == shown(getattr(other, name)), name
    assert list(ours.named_module_buffers) == list(other.named_module_buffers)
    assert all(one is two for one, two in zip(ours.modules_buffers, ours.module.buffers(), strict=True))


@ddp
@pytest.mark.world_size(2)
def test_what_it_logs_is_what_torchs_logs(subject, rank):
    options = {"bucket_cap_mb": 1, "gradient_as_bucket_view": True, "static_graph": True}
    ours, other = subject(alike(Branches), **options), torchs(alike(Branches), **options)
    for wrapped in (ours, other):
        wrapped.register_comm_hook(None, plain_hook)
    told, theirs = ours._get_ddp_logging_data(), other._get_ddp_logging_data()
    assert told == {name: theirs[name] for name in told}


@pytest.mark.beyond_contract("sizes of buckets in the logging data")
@pytest.mark.if_subject_takes("bucket_cap_mb_list")
@ddp
@pytest.mark.world_size(2)
def test_a_list_says_how_much_each_bucket_holds(subject, rank):
    model = alike(lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(7))))  # 128 bytes each
    wrapped = subject(model, bucket_cap_mb=1, bucket_cap_mb_list=[128 / 2**20, 384 / 2**20, 256 / 2**20])
    sizes = [128, 384, 256, 128]
    for step in range(2):
        assert wrapped._get_ddp_logging_data()["bucket_sizes"] == ", ".join(map(str, sizes)), step
        wrapped(torch.ones(1, 4).double() * (rank + 1)).sum().backward()
    assert wrapped.bucket_bytes_cap_list == [128, 384, 256]
    everyone = [None, None]
    dist.all_gather_object(everyone, [p.grad.tolist() for p in model.parameters()])
    assert everyone[0] == everyone[1]


@pytest.mark.if_subject_takes("lazy_bucket_allocation", "skip_all_reduce_unused_params")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["skip_all_reduce_unused_params", "batched_grad_copy", "lazy_bucket_allocation"])
def test_arguments_that_change_no_result(subject, rank, name):
    def loss(module, r):
        return module(torch.ones(1, 2).double() * (r + 1), True).square().sum()

    model = alike(Branches)
    wrapped = subject(model, find_unused_parameters=True, **{name: True})
    for _ in range(2):
        model.zero_grad()
        loss(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(2, loss, Branches))
    assert getattr(wrapped, name) is True


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": object()}, "does not take mixed_precision, got object; compute in torch.autocast,"),
        ({"delay_all_reduce_named_params": [("a", 1)]}, "does not take delay_all_reduce_named_params, got list; leave"),
        ({"param_to_hook_all_reduce": nn.Parameter()}, "does not take param_to_hook_all_reduce, got Parameter; leave"),
        ({"bucket_cap_mb_list": [1, 0]}, r"needs a positive bucket_cap_mb_list, got bucket_cap_mb_list=\[1, 0\]"),
        ({"device_ids": [0]}, r"takes device_ids, .* for a module on one GPU, got device_ids=\[0\] .* on cpu; leave"),
        ({"output_device": 1}, r"takes device_ids, .* and output_device=1 for one on cpu; leave them out"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_what_it_does_not_do_is_refused_on_every_rank(subject, rank, options, message):
    with pytest.raises(ValueError, match=f"DistributedDataParallel: on rank 1, it {message}"):
        subject(alike(), **(options if rank else {}))


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
def test_a_graph_may_be_said_to_be_static_before_training(subject, rank):
    def loss(module, r):
        return module(torch.ones(1, 2).double() * (r + 1), r == 0).square().sum()

    model = alike(Branches)
    wrapped = subject(model)
    wrapped._set_static_graph()
    for _ in range(3):
        model.zero_grad()
        loss(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(2, loss, Branches))
    wrapped._set_static_graph()
    late = subject(alike())
    squared(late, rank).backward()
    with pytest.raises(RuntimeError, match="has had a backward pass, now no graph becomes static; pass static_"):
        late._set_static_graph()


@ddp
@pytest.mark.world_size(2)
def test_what_is_to_be_ignored_may_be_said_as_with_torchs(subject, rank):
    model = alike()
    subject._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    with torch.no_grad():
        model[2].bias.fill_(rank)
    assert subject(model).parameters_to_ignore == {"2.bias"}
    assert model[2].bias.item() == rank
