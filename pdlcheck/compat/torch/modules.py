"""What a module holds itself, without its submodules' parts.

The tables are the module's own and not copies. The public iterators leave out entries that are None and entries that
occur twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from pdlcheck.compat.private import uses

__all__ = ["copy_tables", "is_compiled", "keep_versions", "own_buffers", "own_parameters", "submodules"]


@uses("torch.nn.Module._parameters", lost="parameters that were exchanged after wrapping are not detected")
def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's table of parameters, to detect that one was exchanged."""
    return module._parameters


@uses("torch.nn.Module._buffers", lost="a pipeline's failed step does not restore buffers")
def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's table of buffers, to detect and undo changes."""
    return module._buffers


@uses("torch.nn.Module._modules", lost="layers that occur twice or are exchanged, and names such as self.fc1.weight")
def submodules(owner: Any) -> dict[str, Any]:
    """Return the modules in the attributes of an object, each under all its names; empty if it is no module."""
    return getattr(owner, "_modules", {})


def copy_tables(module: nn.Module, copied: nn.Module, replaced: Mapping[int, Any]) -> None:
    """Give ``copied`` tables of its own, equal to those of ``module``.

    Args:
        module: the original.
        copied: a shallow copy, which shares the tables of the original.
        replaced: by the id of a parameter, buffer or submodule: the one that replaces it.
    """
    for table in ("_parameters", "_buffers", "_modules"):
        vars(copied)[table] = {name: replaced.get(id(one), one) for name, one in vars(module)[table].items()}


@uses("torch.nn.Module._compiled_call_impl", lost="DataParallel copies a compiled module, with wrong results")
def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` was called on a module, which then cannot be copied."""
    return "_orig_mod" in submodules(module) or module._compiled_call_impl is not None


@uses("torch.nn.Module._metadata", lost="modules read a checkpoint as one of an older format")
def keep_versions(state: Any, like: Any) -> None:
    """Give a state dict the versions of the modules' formats that another one has, if it has them."""
    with suppress(AttributeError):
        vars(state)["_metadata"] = like._metadata
