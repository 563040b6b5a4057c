"""A module called with other tensors in the place of its own, and left as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["call_with"]


def call_with(module: nn.Module, values: Mapping[str, Tensor], x: Any) -> Any:
    """As ``functional_call(module, values, (x,))``, also where a layer stands in the module twice.

    There, torch puts the values in under both names, and takes those of the first name for the module's own when it
    puts them back under the second. Here each place gets its value once; places that share a tensor share its value.
    """
    places: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        begin = f"{prefix}." if prefix else ""
        for held in (part._parameters, part._buffers):
            places.update((begin + name, tensor) for name, tensor in held.items() if tensor is not None)
    by_id = {id(places[name]): value for name, value in values.items()}
    chosen = {name: by_id[id(tensor)] for name, tensor in places.items() if id(tensor) in by_id}
    return functional_call(module, chosen, (x,), tie_weights=False)
