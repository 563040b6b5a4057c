"""The arguments of DistributedDataParallel, and the checks that one rank can make of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pdlcheck.compat.torch.groups import backend_name
from pdlcheck.primitives.arguments import Members, require_state, require_writable
from pdlcheck.primitives.data_parallel.sparse_bucket import sparse_embeddings
from pdlcheck.primitives.flat import gradient_dtype

__all__ = ["bucket_caps", "group_of", "takes_buffers", "wrong_arguments", "wrong_devices"]

ME = "DistributedDataParallel"
Devices = Sequence[int | str | torch.device] | None

SUMS_SPARSE = ("gloo", "sim")  # backends that sum sparse tensors; torch 2.13's gloo leaves complex ones unchanged

# Arguments of torch's wrapper that this one does not support, each with its replacement.
ABSENT = {
    "delay_all_reduce_named_params": "leave it out, each gradient is reduced with its bucket",
    "param_to_hook_all_reduce": "leave it out, each gradient is reduced with its bucket",
    "mixed_precision": "compute in torch.autocast, or pass reduce_dtype for the sums",
}


def group_of(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that hold replicas."""
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise ValueError(f"{ME} takes process_group or device_mesh, got both")
    if device_mesh.ndim != 1:
        raise ValueError(
            f"{ME} takes a device_mesh of one dimension, got {device_mesh.ndim}; "
            "pass the part of it that holds replicas, such as mesh['replicate']"
        )
    return device_mesh.get_group()


def bucket_caps(first_mb: float, cap_mb: float, caps_mb: Sequence[float] | None) -> list[int]:
    """Return the bytes that close the first bucket, the second, ...; the last entry holds for all further buckets."""
    return [max(1, int(cap * 2**20)) for cap in caps_mb or [min(first_mb, cap_mb), cap_mb]]


def takes_buffers(options: Mapping[str, Any]) -> bool:
    """Return whether the buffers are copied from rank 0 at construction."""
    return options["broadcast_buffers"] or options["forward_sync_buffers"] is not None


def wrong_arguments(
    module: nn.Module, ignored: set[str], who: Members, options: Mapping[str, Any], absent: Mapping[str, object]
) -> str | None:
    """Return a description of the first problem with the arguments of this rank, or None.

    Args:
        module: the wrapped module.
        ignored: names of parameters and buffers in it that are not wrapped.
        who: the ranks.
        options: the arguments that must be the same on every rank.
        absent: arguments of torch's wrapper that are not supported; None or an empty list is valid.
    """
    for name in ("bucket_cap_mb", "bucket_cap_mb_list", "first_bucket_mb"):
        value = options[name]
        entries = (value or []) if name == "bucket_cap_mb_list" else [value]
        if any(isinstance(one, bool) or not isinstance(one, int | float) or not one > 0 for one in entries):
            return f"it needs a positive {name}, got {name}={value!r}"
    for name, value in absent.items():
        if value is not None and value != []:
            return f"it does not take {name}, got {type(value).__name__}; {ABSENT[name]}"
    dtype = options["reduce_dtype"]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return f"it sums in a floating dtype, got reduce_dtype={dtype!r}"
    return _wrong_module(module, ignored, who, options)


def wrong_devices(module: nn.Module, device_ids: Devices, output_device: object) -> str | None:
    """Return a description of a problem with the devices of this rank, or None.

    As in torch, the devices can only repeat where the module already is.
    """
    if device_ids and len(device_ids) > 1:
        return f"it serves one device in a process, got device_ids={device_ids}; start more ranks"
    devices = sorted({str(p.device) for p in module.parameters()})
    if (device_ids or output_device) and not (device_ids and len(devices) == 1 and devices != ["cpu"]):
        return (
            f"it takes device_ids, and output_device beside it, for a module on one GPU, got device_ids={device_ids} "
            f"and output_device={output_device} for one on {', '.join(devices)}; leave them out"
        )
    return None


def _wrong_module(module: nn.Module, ignored: set[str], who: Members, options: Mapping[str, Any]) -> str | None:
    """Return a description of a problem with the module of this rank, or None."""
    parameters: dict[str, Tensor] = {n: p for n, p in module.named_parameters() if n not in ignored}
    buffers = {n: b for n, b in module.named_buffers() if n not in ignored}
    try:
        require_state(ME, {**parameters, **buffers}, who.group)
        require_writable(ME, {**parameters, **buffers} if takes_buffers(options) else parameters)
    except ValueError as error:
        return str(error).removeprefix(f"{ME} ")
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    if not trained:
        return f"{type(module).__name__} has no parameter that requires a gradient; use it as it is"
    for name, table in sparse_embeddings(module).items():
        if name not in trained:
            continue
        backend = backend_name(who.group, table.device)
        if backend not in SUMS_SPARSE or table.is_complex():
            return (
                f"the gradient of {name!r}, {table.dtype}, is sparse, of which {backend} makes no sums; build the "
                "embedding with sparse=False"
            )
    reduce_dtype = options["reduce_dtype"]
    if options["gradient_as_bucket_view"] and reduce_dtype is not None:
        for name, param in trained.items():
            dtype = gradient_dtype(param)
            if dtype in (torch.float16, torch.bfloat16) and dtype != reduce_dtype:
                return (
                    f"the gradient of {name!r}, {dtype}, cannot be a view of a bucket of {reduce_dtype}; "
                    "pass gradient_as_bucket_view=False"
                )
    return None
