"""The validation of the arguments of ``pdlcheck.watch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pdlcheck.watching.entries import STREAMS
from pdlcheck.watching.replica_sets import Ranks

__all__ = [
    "device_of",
    "own_optimizers",
    "require_same_arguments",
    "validated_ranks",
    "validated_sets",
    "validated_streams",
]


def own_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers whose ``step`` is called in the end, without the wrappers of Accelerate and Lightning."""
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    found = [_unwrapped(one) for one in given]
    for one in found or [None]:
        if not isinstance(one, Optimizer):
            raise TypeError(f"watch takes as optimizer one of torch.optim, or a list of them, got {one!r}")
    return found


def _unwrapped(optimizer: Any) -> Any:
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def validated_ranks(
    model: object,
    every: object,
    scaler: object,
    group: dist.ProcessGroup | None,
    on_violation: object,
    timeout_s: float,
) -> Ranks:
    """Validate these arguments, and return the global ranks of ``group``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch takes as model an nn.Module, got {model!r}")
    if any("_flat_param" in name for name, _ in model.named_parameters()):
        raise ValueError("watch cannot compare FSDP1, whose flat parameters do not name their shards; use fully_shard")
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ValueError(f"every must be a number of steps, 1 or more, or None, got {every!r}")
    if on_violation not in ("raise", "warn") and not callable(on_violation):
        raise ValueError(f"on_violation must be 'raise', 'warn' or a function, got {on_violation!r}")
    if scaler is not None and not callable(getattr(scaler, "state_dict", None)):
        raise TypeError(f"scaler must have state_dict(), as a GradScaler has, got {scaler!r}")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
    if not dist.is_initialized():
        raise ValueError("watch compares the ranks of a process group; call init_process_group before it")
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; call watch on its members only")
    return tuple(dist.get_process_group_ranks(group))


def validated_streams(streams: Mapping[str, str]) -> dict[str, str]:
    """Validate ``streams``, and return it in the order of its names."""
    for name, how in streams.items():
        if name not in STREAMS or how not in ("equal", "different"):
            raise ValueError(
                f"streams maps {', '.join(map(repr, STREAMS))} to 'equal' or 'different', got {name!r}: {how!r}"
            )
    return dict(sorted(streams.items()))


def validated_sets(sets: Sequence[Sequence[int]], ranks: Ranks) -> tuple[Ranks, ...]:
    """Validate ``same_samples``: no rank may be in two sets, or outside of the group."""
    found = tuple(tuple(sorted(one)) for one in sets)
    listed = [rank for one in found for rank in one]
    if len(set(listed)) < len(listed) or not set(listed) <= set(ranks):
        raise ValueError(f"same_samples has disjoint sets of the ranks {list(ranks)}, got {list(map(list, found))}")
    return found


def require_same_arguments(arguments: Mapping[str, object], group: Any, ranks: Ranks) -> None:
    """Raise ``ValueError`` on every rank if an argument differs between ranks. Every rank must call this function."""
    everyone: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everyone, dict(arguments), group=group)
    for rank, given in zip(ranks, everyone, strict=True):
        for name, value in given.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f"watch needs the same arguments on every rank: rank {rank} has {name}={value!r}, "
                    f"rank {ranks[0]} has {everyone[0][name]!r}"
                )


def device_of(model: nn.Module, group: Any) -> torch.device:
    """Return where the group communicates: the CPU for gloo and MPI, else the device of the model."""
    backend = dist.get_backend(group)
    if backend in ("gloo", "mpi"):
        return torch.device("cpu")
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return next((one.device for one in model.parameters()), torch.device("cpu"))
