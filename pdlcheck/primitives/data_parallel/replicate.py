"""Copies of a module, one for each further worker, with gradients that flow back to the module itself."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.compat.torch.modules import copy_tables, is_compiled

__all__ = ["replicate", "require_replicable"]

# A module may hold a vocabulary in a list. Longer containers are not searched for parameters, to keep steps fast.
SEARCHED_ENTRIES = 1000


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return the module itself, for the first device, and a copy for each other device.

    A copy has the structure of the module. Submodules, parameters and buffers that are one object in the module are one
    object in the copy. This includes references in a list or dict of up to 1000 entries, in a bound method or in a
    hook. The parameters of a copy are results of a differentiable copy, so backward adds their gradients to those of
    the module's parameters. A parameter that no worker used keeps the gradient None. Buffers are copied, not averaged.
    Values that a copy writes into its buffers or sets as attributes are lost; those of the module on the first device
    stay.

    Args:
        module: a module on ``devices[0]``.
        devices: the devices of the workers; they may repeat.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> one, other = replicate(layer, [torch.device("cpu")] * 2)
        >>> (one.weight * 2 + other.weight * 3).backward()
        >>> layer.weight.grad.item()
        5.0
    """
    replicas = [module]
    if len(devices) == 1:
        return replicas
    state: list[Tensor] = [*module.parameters(), *module.buffers()]
    live = [tensor for tensor in state if tensor.requires_grad and torch.is_grad_enabled()]
    chosen = {id(tensor) for tensor in live}
    still = [tensor.detach() for tensor in state if id(tensor) not in chosen]
    still_ids = [id(tensor) for tensor in state if id(tensor) not in chosen]
    # torch does not annotate `apply`
    copies: tuple[Tensor, ...] = _Broadcast.apply(devices[1:], *live) if live else ()  # type: ignore[no-untyped-call]
    for place, device in enumerate(devices[1:]):
        mine = copies[place * len(live) : (place + 1) * len(live)]
        swapped: dict[int, Any] = dict(zip((id(tensor) for tensor in live), mine, strict=True))
        swapped.update(zip(still_ids, _copied(still, device), strict=True))
        replicas.append(_shell(module, swapped))
    return replicas


def require_replicable(module: nn.Module) -> None:
    """Raise TypeError for a module whose forward does not read the parameters of a copy."""
    for name, part in module.named_modules():
        where = f"{type(part).__name__} {name!r}" if name else f"a {type(part).__name__}"
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(f"DataParallel cannot copy {where}: it is compiled; wrap the module that it was made of")
        if is_compiled(part):
            raise TypeError(f"DataParallel cannot copy {where}: it is compiled; wrap the module before torch.compile")
        if isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise TypeError(f"DataParallel got {where}, which makes replicas itself; pass its .module")


class _Broadcast(torch.autograd.Function):
    """A copy of tensors to every device; backward adds the copies' gradients, in the order of the devices."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.count = len(tensors)
        ctx.device = tensors[0].device
        return tuple(copy for device in devices for copy in _copied(tensors, device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        sums: list[Tensor | None] = [None] * ctx.count
        for start in range(0, len(grads), ctx.count):
            for place, grad in enumerate(_home(grads[start : start + ctx.count], ctx.device)):
                before = sums[place]
                sums[place] = grad if before is None or grad is None else before + grad
                if grad is None:
                    sums[place] = before
        return (None, *sums)


def _copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return a copy of each tensor.

    Contiguous tensors of one dtype travel as one message. The copies share its memory, but are not views.
    """
    result: list[Tensor | None] = [None] * len(tensors)
    groups: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.layout == torch.strided and tensor.is_contiguous():
            groups.setdefault(tensor.dtype, []).append(place)
        else:
            result[place] = tensor.detach().to(device, copy=True)
    for dtype, places in groups.items():
        flat = torch.cat([tensors[place].detach().reshape(-1) for place in places]).to(device, non_blocking=True)
        offset = 0
        for place in places:
            shape, stride = tensors[place].shape, tensors[place].stride()
            # A view would share its version with all the other pieces, and autograd would count a write into one of
            # them as a write into all.
            piece = torch.empty(0, dtype=dtype, device=device)
            result[place] = piece.set_(flat.untyped_storage(), offset, shape, stride)
            offset += shape.numel()
    return [tensor for tensor in result if tensor is not None]


def _home(grads: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Return the gradients of one copy on the module's device; dense ones of one dtype travel as one message."""
    result = list(grads)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, grad in enumerate(grads):
        if grad is not None and grad.device != device:
            if grad.layout == torch.strided:
                groups.setdefault((grad.dtype, grad.device), []).append(place)
            else:
                result[place] = grad.to(device)
    for places in groups.values():
        chosen = [grad for place in places if (grad := grads[place]) is not None]
        flat = torch.cat([grad.reshape(-1) for grad in chosen]).to(device, non_blocking=True)
        pieces = torch.split(flat, [grad.numel() for grad in chosen])
        for place, piece, grad in zip(places, pieces, chosen, strict=True):
            result[place] = piece.view(grad.shape)
    return result


def _shell(module: nn.Module, swapped: dict[int, Any]) -> nn.Module:
    """Return a copy of the module tree with other tensors; nothing else is copied."""
    parts = list(module.modules())
    for part in parts:
        swapped[id(part)] = type(part).__new__(type(part))
    for part in parts:
        shell = swapped[id(part)]
        shell.__dict__ = {name: _swap(value, swapped) for name, value in part.__dict__.items()}
        copy_tables(part, shell, swapped)
    return swapped[id(module)]  # type: ignore[no-any-return]  # the map holds tensors and modules


def _swap(value: Any, swapped: dict[int, Any], depth: int = 0) -> Any:
    """Return ``value`` with every tensor and module of the original replaced, or ``value`` itself if it holds none."""
    if id(value) in swapped:
        return swapped[id(value)]
    if isinstance(value, types.MethodType):
        owner = swapped.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if type(value) is functools.partial:
        parts = [value.func, *value.args, *value.keywords.values()]
        new = [_swap(part, swapped, depth + 1) for part in parts]
        if not _differ(parts, new):
            return value
        count = 1 + len(value.args)
        return functools.partial(new[0], *new[1:count], **dict(zip(value.keywords, new[count:], strict=True)))
    if type(value) not in (list, tuple, dict, OrderedDict) or not 0 < len(value) <= SEARCHED_ENTRIES or depth > 3:
        return value
    entries = list(value.values()) if isinstance(value, dict) else list(value)
    new = [_swap(entry, swapped, depth + 1) for entry in entries]
    if not _differ(entries, new):
        return value
    if isinstance(value, dict):
        pairs = zip(value, new, strict=True)
        return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)
    return tuple(new) if isinstance(value, tuple) else new


def _differ(entries: Sequence[Any], new: Sequence[Any]) -> bool:
    return any(one is not other for one, other in zip(entries, new, strict=True))
