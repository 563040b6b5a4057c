"""A module called with other tensors in the place of its own, and left as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["Values", "buffers_of", "call_with"]

Values = Mapping[str, Tensor | None]


def buffers_of(module: object) -> dict[str, Tensor | None]:
    """Copies of the buffers of ``module``, by name, also of those that are None until a pass sets them.

    Of what is no module, as a loss may be, none.
    """
    found: dict[str, Tensor | None] = {}
    if isinstance(module, nn.Module):
        for prefix, part in module.named_modules():
            found.update({_join(prefix, name): None for name, buffer in part._buffers.items() if buffer is None})
        found.update((name, buffer.detach().clone()) for name, buffer in module.named_buffers())
    return found


def call_with(module: nn.Module, values: Values, *args: Any) -> Any:
    """As ``functional_call(module, values, args)``, also where a layer stands in the module twice.

    There, torch puts the values in under both names, and takes those of the first name for the module's own when it
    puts them back under the second. Here each place gets its value once; places that share a tensor share its value.
    A buffer may be None, in the module or in ``values``.
    """
    places: dict[str, Tensor] = {}
    by_hand: list[tuple[dict[str, Tensor | None], str, Tensor | None, Tensor | None]] = []
    for prefix, part in module.named_modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                full = _join(prefix, name)
                if full in values and (tensor is None or values[full] is None):
                    by_hand.append((held, name, tensor, values[full]))
                elif tensor is not None:
                    places[full] = tensor
    by_id = {id(places[name]): value for name, value in values.items() if name in places}
    chosen = {name: value for name, tensor in places.items() if (value := by_id.get(id(tensor))) is not None}
    for held, name, _, value in by_hand:
        held[name] = value
    try:
        return functional_call(module, chosen, args, tie_weights=False)
    finally:
        for held, name, tensor, _ in by_hand:
            held[name] = tensor


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
