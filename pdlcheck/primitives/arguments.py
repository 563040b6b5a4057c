"""What one rank can see of its arguments, checked before any communication.

What only several ranks together can see (shapes, dtypes, order of the calls) is the world's to report.
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
    """The ranks of a group as one of them sees it.

    ``torch.distributed`` addresses messages by global rank; a ring or a tree is laid out in places of the
    group.

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
        return len(self.ranks)

    def at(self, place: int) -> int:
        """The global rank at ``place``, counted around the ring."""
        return self.ranks[place % len(self.ranks)]

    def place_of(self, caller: str, src: int) -> int:
        """The place of the global rank ``src``; ValueError where the group does not contain it."""
        if isinstance(src, bool) or not isinstance(src, int):
            raise TypeError(f"{caller} takes src as a global rank, an int, got {type(src).__name__}")
        if src not in self.ranks:
            raise ValueError(
                f"{caller} got src={src}, which is outside the group; src is a global rank, one of {list(self.ranks)}"
            )
        return self.ranks.index(src)


def members(caller: str, group: dist.ProcessGroup | None) -> Members:
    """The ranks of ``group``; ValueError without a process group or on a rank that is not in it."""
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
    assert found is not None  # is_initialized said so
    return Members(found, tuple(dist.get_process_group_ranks(found)), dist.get_rank(found))


def require_tensor(caller: str, tensor: object, group: dist.ProcessGroup | None, *, arithmetic: bool = False) -> Tensor:
    """Return ``tensor`` as the backend can take it: dense, contiguous, on a device of the group's backend."""
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
    """Every named tensor of a module must be made, whole, dense and on a device of the group's backend."""
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
    """Every named tensor must have memory for each of its elements: other ranks' values are copied into it."""
    for name, tensor in tensors.items():
        if any(side > 1 and not stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"{caller} got {name!r}, an expanded tensor, whose elements share memory; replace it by its .clone()"
            )


def require_int(caller: str, argument: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{caller} takes {argument} as an int, got {type(value).__name__}")


def require_at_least(caller: str, argument: str, value: int, least: int) -> None:
    """``value`` must be an int that is not below ``least``."""
    require_int(caller, argument, value)
    if value < least:
        raise ValueError(f"{caller} needs {argument} of at least {least}, got {argument}={value}")


def named_state(caller: str, module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers by name, shared ones once; also buffers that no state_dict holds."""
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
    """Where a small tensor of our own has to be for the group's backend: on the CPU if it can."""
    usable = _usable_devices(group)
    return torch.device("cuda" if "cuda" in usable and "cpu" not in usable else "cpu")


def _usable_devices(group: dist.ProcessGroup | None) -> list[str]:
    """Device types in a configuration such as ``cpu:gloo,cuda:nccl``."""
    return [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",") if ":" in entry]
