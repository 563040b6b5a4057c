"""The logical names of the modules and parameters of a rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from torch import nn

__all__ = ["logical_names", "owner_of"]

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?:\.|$)")


def logical_names(
    models: Sequence[nn.Module], rename: Callable[[str], str | None] | None
) -> tuple[dict[str, tuple[int, nn.Module]], dict[str, nn.Parameter]]:
    """Return the modules, each with the number of its model, and the parameters, under their logical names.

    The model itself has the name ``model``, unless it is a part: one of several, or renamed.

    Raises:
        ValueError: two parameters have one name.
    """
    modules: dict[str, tuple[int, nn.Module]] = {}
    parameters: dict[str, nn.Parameter] = {}
    for i, model in enumerate(models):
        prefix = f"{i}." if len(models) > 1 else ""
        is_whole = not prefix and rename is None
        for name, module in model.named_modules():
            plain = _WRAPPERS.sub("", prefix + name).rstrip(".")
            logical = (rename(plain) or "").rstrip(".") if rename else plain  # a stage itself may have no name
            if is_whole and not name:
                logical = "model"
            if logical and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                modules.setdefault(logical, (i, module))
        for name, parameter in model.named_parameters():
            plain = _WRAPPERS.sub("", prefix + name)
            found = rename(plain) if rename else plain
            if found is None:
                continue
            if found in parameters and parameters[found] is not parameter:
                raise ValueError(f"rename= gives two parameters of this rank the name {found!r}; give each its own")
            parameters[found] = parameter
    return modules, parameters


def owner_of(parameter: str) -> str:
    """Return the name of the module that has a parameter."""
    return parameter.rpartition(".")[0] or "model"
