"""Modules through which a framework calls ``torch.distributed``: a report shows the lines that call these modules.

A framework that communicates through one module of its own has the same line for all operations, which does not help
users.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

__all__ = ["declare", "is_comm_wrapper"]

# modules, and packages with all their modules
_KNOWN = (
    "accelerate.utils.operations",
    "composer.utils.dist",
    "deepspeed.comm",
    "detectron2.utils.comm",
    "ignite.distributed",
    "lightning.fabric.plugins.collectives",
    "lightning.fabric.utilities.distributed",
    "lightning_fabric.plugins.collectives",
    "lightning_fabric.utilities.distributed",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.tensor_parallel.mappings",
    "mmengine.dist",
    "nanotron.distributed",
    "nanotron.parallel.pipeline_parallel.p2p",
    "nanotron.parallel.tensor_parallel.distributed_differentiable_primitives",
    "picotron.context_parallel.cp_communications",
    "picotron.pipeline_parallel.pp_communications",
    "picotron.tensor_parallel.tp_communications",
)
_declared: tuple[str, ...] = ()  # for the world that is open


def declare(names: Sequence[str]) -> bool:
    """Set the wrappers besides the known ones; return whether that changes anything."""
    global _declared
    if _declared == tuple(names):
        return False
    _declared = tuple(names)
    return True


def is_comm_wrapper(path: str) -> bool:
    """Return whether this is a file of such a module, and the module is imported."""
    return any(path == file or (folder and path.startswith(folder)) for file, folder in map(_place, _names()))


def _names() -> Iterable[str]:
    return (*_KNOWN, *_declared)


def _place(name: str) -> tuple[str, str]:
    """Return the file of a module, and its folder if it is a package."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return "", ""
    return file, os.path.dirname(file) + os.sep if hasattr(module, "__path__") else ""
