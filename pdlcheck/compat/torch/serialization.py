"""The private names of torch's files: the functions that restore storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import serialization

from pdlcheck.compat.private import name, uses

__all__ = ["LOAD_STORAGE", "unregister_package"]

_loads: Final = name(
    "torch.storage._load_from_bytes",
    "the device to which a rank loads the tensors of a pickle",
    lost="ranks of nccl load the tensors of a call to the controller's device",
)
LOAD_STORAGE: Final = (_loads.path.rpartition(".")[0], _loads.attribute)  # module and name in a pickle of a tensor


@uses("torch.serialization._package_registry", lost="torch.load keeps marking CUDA storages after --cuda-as-cpu")
def unregister_package(restore: Callable[..., Any]) -> None:
    """Take back what ``torch.serialization.register_package`` has registered with this function."""
    registry = serialization._package_registry
    registry[:] = [entry for entry in registry if entry[2] is not restore]
