"""What torch's DistributedDataParallel reads and keeps, and a wrapper in its place must read and keep as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable

from pdlcheck.compat.private import take, uses
from pdlcheck.compat.torch.dynamo import skip_frames

__all__ = ["device_index", "ignore_names", "ignored_names", "is_joining", "wrapped_parameters"]

device_index: Callable[[int | torch.device, bool], int] = take(
    "torch._utils._get_device_index",
    "the index of an entry of device_ids, read as by torch's wrapper",
    lost="DistributedDataParallel takes no device_ids",
)


@uses(
    "torch.nn.parallel.DistributedDataParallel._ddp_params_and_buffers_to_ignore",
    lost="DistributedDataParallel handles parameters that the program wants left alone",
)
def ignored_names(module: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that a data parallel wrapper of a module ignores."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_names(module: nn.Module, names: Iterable[str]) -> None:
    """Let data parallel wrappers of a module ignore these parameters and buffers."""
    setattr(module, "_ddp_params_and_buffers_to_ignore", names)  # noqa: B010 - a module's types allow no such attribute


@uses(
    "torch.nn.parallel.DistributedDataParallel._module_parameters",
    lost="parameters that took the place of wrapped ones are not named as a cause",
)
def wrapped_parameters(wrapper: nn.parallel.DistributedDataParallel) -> Iterable[nn.Parameter]:
    """Return the parameters whose gradients a wrapper reduces; those of the module may be others by now."""
    parameters: Iterable[nn.Parameter] = wrapper._module_parameters
    return parameters


@uses("torch.distributed.algorithms.join.Joinable._join_config", lost="DistributedDataParallel.join does not work")
def is_joining(joinable: Joinable) -> bool:
    """Return whether a wrapper is used in an enabled context of Join."""
    enabled: bool = joinable._join_config.enable
    return enabled


skip_frames(is_joining, "SKIP")  # it is called in each forward pass, from a frame whose calls are compiled
