"""Calls of a module with other tensors in place of its own; the module does not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from pdlcheck.compat.torch.modules import own_buffers, own_parameters

__all__ = ["Values", "buffers_of", "call_with"]

Values = Mapping[str, Tensor | None]


def buffers_of(module: object) -> dict[str, Tensor | None]:
    """Return copies of the buffers of ``module``, by name, including those that are None until a pass sets them.

    Return no buffers if ``module`` is not a module; a loss may be a function.
    """
    found: dict[str, Tensor | None] = {}
    if isinstance(module, nn.Module):
        for prefix, part in module.named_modules():
            found.update({_join(prefix, name): None for name, buffer in own_buffers(part).items() if buffer is None})
        found.update((name, buffer.detach().clone()) for name, buffer in module.named_buffers())
    return found


def call_with(module: nn.Module, values: Values, *args: Any) -> Any:
    """Call ``functional_call(module, values, args)``, also for a module that contains a layer twice.

    torch sets the values of such a layer under both names. At the second name it saves the value set under the first
    name as the original, and restores the wrong tensor. Here each place gets its value once; places that share a tensor
    share its value. A buffer may be None, in the module or in ``values``.
    """
    places: dict[str, Tensor] = {}
    by_hand: list[tuple[dict[str, Tensor | None], str, Tensor | None, Tensor | None]] = []
    for prefix, part in module.named_modules():
        tables: tuple[dict[str, Any], ...] = (own_parameters(part), own_buffers(part))
        for held in tables:
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
