"""Argument checks that need one rank only, before any communication.

The world reports problems that need several ranks to detect: shapes, dtypes, order of the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = [
    "Members",
    "members",
    "named_state",
    "require_at_least",
    "require_int",
    "require_state",
    "require_tensor",
    "require_writable",
    "wire_device",
]


@dataclass(frozen=True)
class Members:
    """The ranks of a group, from the point of view of one rank.

    ``torch.distributed`` addresses messages by global rank. A ring or a tree is laid out in places of the group.

    Args:
        group: the process group itself.
        ranks: the global ranks, in the order of the group.
        rank: the place of this rank in ``ranks``.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    rank: int

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.ranks)

    def at(self, place: int) -> int:
        """Return the global rank at ``place``, counted around the ring."""
        return self.ranks[place % len(self.ranks)]

    def place_of(self, caller: str, src: int) -> int:
        """Return the place of the global rank ``src``. Raise ValueError if ``src`` is outside the group."""
        if isinstance(src, bool) or not isinstance(src, int):
            raise TypeError(f"{caller} takes src as a global rank, an int, got {type(src).__name__}")
        if src not in self.ranks:
            raise ValueError(
                f"{caller} got src={src}, which is outside the group; src is a global rank, one of {list(self.ranks)}"
            )
        return self.ranks.index(src)


def members(caller: str, group: dist.ProcessGroup | None) -> Members:
    """Return the ranks of ``group``. Raise ValueError without a process group, or on a rank outside the group."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{caller} needs a process group; call torch.distributed.init_process_group first, "
            "or run it inside a world of pdlcheck"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"{caller} was called on rank {dist.get_rank()}, which is outside the group; "
            "call it on the ranks of the group only"
        )
    found = dist.group.WORLD if group is None else group
    assert found is not None  # the default group exists, because is_initialized() returned True
    return Members(found, tuple(dist.get_process_group_ranks(found)), dist.get_rank(found))


def require_tensor(caller: str, tensor: object, group: dist.ProcessGroup | None, *, arithmetic: bool = False) -> Tensor:
    """Return ``tensor``. Raise if the backend cannot send it: it must be dense, contiguous and on a supported device.

    With ``arithmetic``, raise TypeError for booleans too.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{caller} takes a torch.Tensor, got {type(tensor).__name__}; torch.as_tensor makes one")
    if tensor.layout != torch.strided:
        raise ValueError(f"{caller} needs a dense tensor, got layout {tensor.layout}; call .to_dense() first")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{caller} needs a contiguous tensor, got strides {tuple(tensor.stride())} "
            f"for shape {tuple(tensor.shape)}; call .contiguous() first"
        )
    if arithmetic and tensor.dtype == torch.bool:
        raise TypeError(f"{caller} adds numbers, got dtype torch.bool; call .to(torch.int32) first")
    _require_device(caller, "tensor", tensor, group, _usable_devices(group))
    return tensor


def require_state(caller: str, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Raise ValueError unless every tensor has a shape, is whole and dense, and is on a device of the backend."""
    usable = _usable_devices(group)
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise ValueError(f"{caller} got {name!r}, which has no shape yet; run one forward pass first")
        if hasattr(tensor, "to_local"):
            raise ValueError(
                f"{caller} needs tensors that each rank holds whole, {name!r} is a {type(tensor).__name__}; "
                "torch's DistributedDataParallel(device_mesh=...) and fully_shard take layers in tensor parallel"
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{caller} needs dense tensors, {name!r} has layout {tensor.layout}")
        _require_device(caller, repr(name), tensor, group, usable)


def require_writable(caller: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor does not have memory for each element: other ranks' values are copied into it."""
    for name, tensor in tensors.items():
        if any(side > 1 and not stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"{caller} got {name!r}, an expanded tensor, whose elements share memory; replace it by its .clone()"
            )


def require_int(caller: str, argument: str, value: int) -> None:
    """Raise TypeError unless ``value`` is an int; a bool is not accepted."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{caller} takes {argument} as an int, got {type(value).__name__}")


def require_at_least(caller: str, argument: str, value: int, least: int) -> None:
    """Raise unless ``value`` is an int of at least ``least``."""
    require_int(caller, argument, value)
    if value < least:
        raise ValueError(f"{caller} needs {argument} of at least {least}, got {argument}={value}")


def named_state(caller: str, module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters and the buffers by name, shared ones once. Include buffers that no state_dict holds."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller} takes a torch.nn.Module, got {type(module).__name__}")
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    seen = {id(tensor) for tensor in parameters.values()}
    buffers = {name: tensor for name, tensor in module.named_buffers() if id(tensor) not in seen}
    if not parameters and not buffers:
        raise ValueError(f"{caller} got an empty model: {type(module).__name__} has no parameter and no buffer")
    return parameters, buffers


def _require_device(caller: str, what: str, tensor: Tensor, group: dist.ProcessGroup | None, usable: list[str]) -> None:
    if usable and tensor.device.type not in usable:
        raise ValueError(
            f"{caller} got {what} on device {tensor.device}, the group's backend {dist.get_backend(group)} "
            f"takes {' or '.join(usable)}; move it with .to({usable[0]!r})"
        )


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for pdlcheck's own small tensors: the CPU if the group's backend supports it."""
    usable = _usable_devices(group)
    return torch.device("cuda" if "cuda" in usable and "cpu" not in usable else "cpu")


def _usable_devices(group: dist.ProcessGroup | None) -> list[str]:
    """Return the device types in a configuration such as ``cpu:gloo,cuda:nccl``."""
    return [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",") if ":" in entry]
