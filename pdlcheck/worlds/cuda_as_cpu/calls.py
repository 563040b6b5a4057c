"""Replacements for calls of torch that name CUDA in their arguments; each makes the corresponding call for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch

from pdlcheck.compat.torch.devices import default_devices, device_constructors
from pdlcheck.compat.torch.meshes import whole_mesh
from pdlcheck.worlds.cuda_as_cpu import memory, streams
from pdlcheck.worlds.cuda_as_cpu.functions import refuse
from pdlcheck.worlds.cuda_as_cpu.mode import asked_by_torch, in_mode
from pdlcheck.worlds.rank_devices import devices_of_caller, is_cuda, require_devices

__all__ = [
    "AUTOCAST",
    "autocast",
    "barrier",
    "bind_no_device",
    "cast",
    "compile_nothing",
    "data_parallel",
    "default_device",
    "device_mesh",
    "device_type",
    "event",
    "event_of_kind",
    "fully_sharded",
    "generator",
    "get_default_device",
    "grad_scaler",
    "in_mode_of_rank",
    "init_process_group",
    "module_to",
    "new_group",
    "no_range",
    "of_autocast",
    "start_thread",
    "storage_to",
    "stream",
    "stream_of_kind",
    "sync_batch_norm",
]

AUTOCAST = ("get_autocast_dtype", "is_autocast_enabled", "set_autocast_dtype", "set_autocast_enabled")
_OF_CUDA = "pdlcheck_of_cuda"  # the attribute of a mesh that the program has made of CUDA devices


def in_mode_of_rank(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``real`` with CUDA devices replaced in all code that it calls, such as the user's hooks."""
    with in_mode(require_devices()):
        return real(*args, **kwargs)


def start_thread(real: Callable[..., Any], thread: Any) -> None:
    """Start a thread that belongs to the rank of the thread that starts it."""
    run, devices = thread.run, require_devices()

    def run_in_mode() -> None:
        with in_mode(devices):
            run()

    thread.run = run_in_mode
    real(thread)


def event(real: Any, *args: Any, **kwargs: Any) -> streams.Event:
    """Return an event in place of ``torch.cuda.Event``."""
    return streams.Event(*args, **kwargs)


def event_of_kind(real: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> Any:
    """Return an event in place of ``torch.Event``, of the kind of ``device``."""
    return streams.Event(*args, **kwargs) if is_cuda(device) else real(device, *args, **kwargs)


def stream(real: Any, *args: Any, **kwargs: Any) -> streams.Stream:
    """Return a stream in place of ``torch.cuda.Stream``."""
    return streams.Stream(*args, **kwargs)


def stream_of_kind(real: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> Any:
    """Return a stream in place of ``torch.Stream``, of the kind of ``device``."""
    return streams.Stream(device, *args, **kwargs) if is_cuda(device) else real(device, *args, **kwargs)


@contextmanager
def no_range(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Mark nothing in a profile, as a call or as a block."""
    yield


# -- devices of modules and factories --------------------------------------------------------------


def module_to(real: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``Module.to``, whose argument parser accepts no device index if torch has no accelerator."""
    index = require_devices().index
    if args and isinstance(args[0], int) and is_cuda(args[0]):
        args = (torch.device("cuda", index(args[0])), *args[1:])
    elif isinstance(device := kwargs.get("device"), int) and is_cuda(device):
        kwargs["device"] = torch.device("cuda", index(device))
    return real(module, *args, **kwargs)


def storage_to(real: Callable[..., Any], storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
    """Move a storage as ``UntypedStorage.to`` and ``cuda`` do; functions given to ``torch.load`` call them."""
    if not is_cuda(device):
        return real(storage, device=device, non_blocking=non_blocking)
    moved = storage.clone()
    memory.mark_storage(moved, require_devices().index(device))
    return moved


def default_device(
    real: Callable[..., Any], mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Call a factory function under ``torch.set_default_device`` or in ``with torch.device(...)``."""
    kwargs = kwargs or {}
    if not is_cuda(mode.device) or func not in device_constructors() or kwargs.get("device") is not None:
        return real(mode, func, types, args, kwargs)
    with in_mode(require_devices()):
        return func(*args, **{**kwargs, "device": mode.device})


def get_default_device(real: Callable[..., Any]) -> Any:
    """Return the default device with its index."""
    for device in reversed(default_devices()):
        if is_cuda(device):
            return torch.device("cuda", require_devices().index(device))
    return real()


def generator(real: Any, device: Any = "cpu") -> Any:
    """Return a generator of the CPU in place of one of a CUDA device."""
    return real("cpu" if is_cuda(device) else device)


# -- mixed precision -------------------------------------------------------------------------------


def autocast(
    real: Callable[..., Any], block: Any, device_type: Any, dtype: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Make ``torch.autocast("cuda")`` that of the CPU, with CUDA's default dtype."""
    if device_type != "cuda":
        return real(block, device_type, dtype, *args, **kwargs)  # type: ignore[no-any-return]
    return real(block, "cpu", torch.float16 if dtype is None else dtype, *args, **kwargs)  # type: ignore[no-any-return]


def of_autocast(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Read or set the CPU's autocast state in place of CUDA's; a call without a device type means CUDA."""
    if not args or not isinstance(args[0], str):
        args = ("cpu", *args)
    return real(*("cpu" if value == "cuda" else value for value in args), **kwargs)


def cast(real: Callable[..., Any], value: Any, device_type: str, dtype: Any) -> Any:
    """Cast the inputs of a function that ``torch.amp.custom_fwd`` decorates."""
    return real(value, "cpu" if device_type == "cuda" else device_type, dtype)


def grad_scaler(real: Callable[..., Any], scaler: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
    """Make a gradient scaler for the CPU in place of one for CUDA."""
    real(scaler, "cpu" if is_cuda(device) else device, *args, **kwargs)


# -- torch.distributed -----------------------------------------------------------------------------


def init_process_group(real: Callable[..., Any], backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Make a group of the ranks' backend in place of NCCL's, and bind no device to it."""
    kwargs.pop("device_id", None)
    kwargs.pop("pg_options", None)
    return real(_backend(backend), *args, **kwargs)


def bind_no_device(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a group of simulated ranks, whatever its backend, and bind no device to it."""
    kwargs.pop("device_id", None)
    return real(*args, **kwargs)


def new_group(real: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Make a group as :func:`init_process_group` does."""
    bound = signature(real).bind(ranks, *args, **kwargs)
    for name in ("device_id", "pg_options"):
        bound.arguments.pop(name, None)
    if (backend := bound.arguments.get("backend")) is not None:
        bound.arguments["backend"] = _backend(backend)
    return real(*bound.args, **bound.kwargs)


def _backend(name: Any) -> Any:
    if not (isinstance(name, str) and "nccl" in name.lower()):
        return name
    own = require_devices().backend
    if own == "mpi":
        from pdlcheck.worlds.mpi import BACKEND

        return BACKEND
    return own


def barrier(real: Callable[..., Any], group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """Call a barrier without devices, after a check that ``device_ids`` are devices of the rank."""
    for device in device_ids or ():
        require_devices().index(device)
    return real(*([] if group is None else [group]), async_op=async_op)


def device_mesh(real: Callable[..., Any], mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Make a mesh of CPUs in place of a mesh of CUDA devices."""
    setattr(mesh, _OF_CUDA, device_type == "cuda")
    real(mesh, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def device_type(real: property) -> property:
    """Return a property ``DeviceMesh.device_type`` that gives the user's code ``cuda`` for a mesh of CUDA devices.

    This includes slices of such a mesh. torch's own code gets the real value.
    """

    def for_users(mesh: Any) -> str:
        is_of_cuda = getattr(whole_mesh(mesh), _OF_CUDA, False) and devices_of_caller() is not None
        return "cuda" if is_of_cuda and not asked_by_torch() else real.__get__(mesh)

    return property(for_users, doc=real.__doc__)


def data_parallel(
    real: Callable[..., Any], wrapper: Any, module: Any, device_ids: Any = None, output_device: Any = None,
    *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    """Make DDP move nothing to a device, because the model and its inputs are on the CPU."""
    for device in (*(device_ids or ()), *([] if output_device is None else [output_device])):
        require_devices().index(device)
    real(wrapper, module, None, None, *args, **kwargs)


def fully_sharded(real: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Make FSDP compute on the CPU, by an explicit ``device_id``."""
    device = kwargs.get("device_id")
    if device is None or is_cuda(device):
        require_devices().index(device)
        kwargs["device_id"] = torch.device("cpu")
    real(wrapper, *args, **kwargs)


def sync_batch_norm(real: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse SyncBatchNorm in training, because it has kernels for GPUs only."""
    if layer.training:
        refuse("SyncBatchNorm in training", "leave convert_sync_batchnorm away, or test this on a GPU")()
    return real(layer, *args, **kwargs)


# -- compilation -----------------------------------------------------------------------------------


def compile_nothing(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function given to ``torch.compile`` without compilation.

    Code compiled for the CPU is not the code that CUDA would run.
    """
    compiled = real(*args, **kwargs)
    torch.compiler.set_stance("force_eager")
    return compiled
