"""The torch-function mode in which a rank's code runs: it replaces CUDA device arguments by the CPU.

torch itself implements ``torch.set_default_device`` with a torch.overrides.TorchFunctionMode. The tensors are CPU
tensors. They remember the device on which the program has put them (``memory.py``), and code outside torch reads it
from ``tensor.device``. torch's own code reads ``cpu``, and therefore takes its paths for the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pdlcheck.compat.torch.devices import parse_to
from pdlcheck.compat.torch.modes import enter_function_mode, has_function_mode, leave_function_mode
from pdlcheck.worlds.cuda_as_cpu import memory
from pdlcheck.worlds.cuda_as_cpu.memory import HOST
from pdlcheck.worlds.rank_devices import RankDevices, is_cuda

__all__ = ["CudaAsCpuMode", "asked_by_torch", "in_mode"]

_CPU = torch.device("cpu")
_READS_THE_TRUTH = frozenset({"pdlcheck", "torch"})
_LOADERS = "torch.utils.data."  # data loaders pin their batches if there is an accelerator
_OURS = "pdlcheck.worlds.cuda_as_cpu."
_Special = Callable[[RankDevices, Callable[..., Any], tuple[Any, ...], dict[str, Any], bool], Any]


def asked_by_torch(depth: int = 2) -> bool:
    """Return whether the function that called the caller belongs to torch or to pdlcheck."""
    frame: Any = sys._getframe(depth)
    name = frame.f_globals.get("__name__", "")
    while frame.f_back and (frame.f_code.co_name == "__torch_function__" or name.startswith(_OURS)):  # skip modes
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in _READS_THE_TRUTH and not name.startswith(_LOADERS)


class CudaAsCpuMode(TorchFunctionMode):
    """A mode that runs calls of torch's functions on the CPU.

    Args:
        devices: the devices of the rank whose code runs.
    """

    def __init__(self, devices: RankDevices) -> None:
        super().__init__()
        self.devices = devices

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self.devices, func, args, kwargs, func in _ASKS and asked_by_torch())
        return call_on_cpu(self.devices, func, args, kwargs)


def call_on_cpu(devices: RankDevices, func: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch; its results are on the device that the call names, or on the device of its tensors."""
    args = tuple(args)
    device = kwargs.get("device")
    index = None
    if device is not None and not isinstance(device, Tensor):
        index = devices.index(device) if is_cuda(device) else HOST
        if index != HOST:
            kwargs = {**kwargs, "device": _CPU}
    if "pin_memory" in kwargs:
        pinned = kwargs["pin_memory"]
        kwargs = {**kwargs, "pin_memory": False}
    else:
        pinned = False
    made = func(*args, **kwargs)
    if isinstance(made, Tensor):
        return _placed(made, func, args, kwargs, index, pinned)
    if isinstance(made, tuple | list):
        for tensor in made:
            if isinstance(tensor, Tensor):
                _placed(tensor, func, args, kwargs, index, pinned=False)
    return made


def _placed(
    made: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None, pinned: bool
) -> Tensor:
    if func in _ALIASES and index is not None:
        if args and isinstance(args[0], Tensor):
            return memory.move(made, args[0], index)
        return memory.mark(made.clone() if index != HOST else made, index)
    if pinned:
        return memory.pin(made)
    inputs = list(_tensors(args, kwargs))
    if index is None:
        index = next((known for known in map(memory.device_index, inputs) if known != HOST), HOST)
    if index != HOST and memory.device_index(made) == HOST and not any(memory.share_memory(made, x) for x in inputs):
        memory.mark(made, index)
    return made


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))


# -- the device attributes of a tensor -------------------------------------------------------------


def _device(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    index = HOST if by_torch else memory.device_index(args[0])
    return func(*args, **kwargs) if index == HOST else torch.device("cuda", index)


def _is_cuda(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    return func(*args, **kwargs) if by_torch else memory.device_index(args[0]) != HOST


def _is_cpu(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    return func(*args, **kwargs) and (by_torch or memory.device_index(args[0]) == HOST)


def _get_device(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    index = HOST if by_torch else memory.device_index(args[0])
    return func(*args, **kwargs) if index == HOST else index


def _type(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if wanted is None:
        name = func(*args, **kwargs)
        marked = not by_torch and memory.device_index(args[0]) != HOST
        return name.replace("torch.", "torch.cuda.", 1) if marked else name
    if isinstance(wanted, torch.dtype):
        return call_on_cpu(devices, func, args, kwargs)
    name = wanted if isinstance(wanted, str) else f"{wanted.__module__}.{wanted.__name__}"
    present = memory.device_index(args[0])
    index = HOST if not name.startswith("torch.cuda.") else devices.current if present == HOST else present
    return memory.move(func(args[0], name.replace("torch.cuda.", "torch.", 1)), args[0], index)


# -- calls that move a tensor ----------------------------------------------------------------------


def _cuda(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    tensor, *rest = args
    index = devices.index(rest[0] if rest else kwargs.get("device"))
    form = kwargs.get("memory_format", torch.preserve_format)
    return memory.move(tensor.to(_CPU, memory_format=form), tensor, index)


def _cpu(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    return memory.move(func(*args, **kwargs), args[0], HOST)


def _to(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    tensor, *rest = args
    first = rest[0] if rest else kwargs.get("other")
    index: int | None = None
    if isinstance(first, Tensor):
        index = memory.device_index(first)
    elif rest and (isinstance(first, str | torch.device) or is_cuda(first)):
        index = devices.index(first) if is_cuda(first) else _elsewhere(first)
        rest[0] = _CPU if is_cuda(first) else first
    elif (device := kwargs.get("device")) is not None:
        index = devices.index(device) if is_cuda(device) else _elsewhere(device)
        kwargs = {**kwargs, "device": _CPU if is_cuda(device) else device}
    if index is None:
        return call_on_cpu(devices, func, (tensor, *rest), kwargs)
    return memory.move(func(tensor, *rest, **kwargs), tensor, index)


def _elsewhere(device: str | torch.device) -> int | None:
    """Return ``HOST`` for the CPU; None for another kind of device, such as meta."""
    return HOST if torch.device(device).type == "cpu" else None


def _pin_memory(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    return memory.pin(args[0])


def _is_pinned(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    return memory.is_pinned(args[0])


def _attention(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    """Compute attention of DTensors that are sharded by samples or heads: each shard by itself.

    torch can shard CUDA's fused attention kernels, but not the CPU's.
    """
    others = {**kwargs}
    query, key, value = (others.pop(name, None) for name in ("query", "key", "value"))
    tensors = [*args[:3], *(tensor for tensor in (query, key, value) if tensor is not None)]
    places = {getattr(tensor, "placements", None) for tensor in tensors}
    mesh = getattr(tensors[0], "device_mesh", None)
    independent = tensors[0].dim() - 2  # the dimensions before those of positions and features
    if mesh is None or len(places) > 1 or not all(_is_within(place, independent) for place in tensors[0].placements):
        return call_on_cpu(devices, func, args, kwargs)
    shards = [tensor.to_local() for tensor in tensors]
    attended = call_on_cpu(devices, func, (*shards, *args[3:]), others)
    whole = torch.Size((*tensors[0].shape[:-1], tensors[2].shape[-1]))
    stride = torch.empty(whole, device="meta").stride()
    from_local = type(tensors[0]).from_local
    return from_local(attended, mesh, tensors[0].placements, run_check=False, shape=whole, stride=stride)


def _is_within(place: Any, dims: int) -> bool:
    """Return whether a placement is a replica, or a shard of one of the first ``dims`` dimensions."""
    return bool(place.is_replicate() or (place.is_shard() and place.dim < dims))


def _at_once(devices: RankDevices, func: Any, args: Any, kwargs: Any, by_torch: bool) -> Any:
    return func(*args, **kwargs)


_base: Any = Tensor.__base__  # the class of the methods that are written in C++
_ASKS = {
    _base.device.__get__,
    _base.is_cuda.__get__,
    _base.is_cpu.__get__,
    _base.get_device,
    _base.type,
}
_ALIASES = {torch.as_tensor, torch.asarray}
_SPECIAL: dict[Any, _Special] = {
    _base.device.__get__: _device,
    _base.is_cuda.__get__: _is_cuda,
    _base.is_cpu.__get__: _is_cpu,
    _base.get_device: _get_device,
    _base.type: _type,
    _base.cuda: _cuda,
    _base.cpu: _cpu,
    _base.to: _to,
    _base.pin_memory: _pin_memory,
    _base.is_pinned: _is_pinned,
    torch.nn.functional.scaled_dot_product_attention: _attention,
    # the most frequent calls; their results need no device mark
    **dict.fromkeys(
        (
            parse_to,  # used by Module.to: it returns the device of its arguments
            _base.untyped_storage,
            _base.data_ptr,
            _base.size,
            _base.dim,
            _base.numel,
            _base.item,
            _base.stride,
            _base.is_floating_point,
            _base.shape.__get__,
            _base.dtype.__get__,
            _base.layout.__get__,
            _base.requires_grad.__get__,
            _base.is_leaf.__get__,
            _base.grad_fn.__get__,
            _base.ndim.__get__,
        ),
        _at_once,
    ),
}


@contextmanager
def in_mode(devices: RankDevices) -> Iterator[None]:
    """Run the block in the mode of ``devices``, unless a mode is in force already.

    A block may leave its own modes entered, such as the one of ``torch.set_default_device``.
    """
    if has_function_mode(CudaAsCpuMode):
        yield
        return
    mode = CudaAsCpuMode(devices)
    enter_function_mode(mode)
    try:
        yield
    finally:
        leave_function_mode(mode)
