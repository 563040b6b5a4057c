"""The tensors in a module's output, and the parameters that lead to them."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

__all__ = ["parameters_behind", "tensors_in"]

CLOSED = (str, bytes, int, float, complex, type(None), type, nn.Module, types.FunctionType, types.ModuleType)


def tensors_in(output: object) -> Iterator[Tensor]:
    """Yield every tensor in nested containers, dataclasses and objects with attributes. Visit each container once."""
    seen: set[int] = set()
    waiting = [output]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Tensor):
            yield found
            continue
        if isinstance(found, CLOSED) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Mapping):
            waiting += found.values()
        elif isinstance(found, list | tuple | set | frozenset):
            waiting += found
        waiting += getattr(found, "__dict__", {}).values()
        waiting += [getattr(found, name) for name in _slots(found) if hasattr(found, name)]


def parameters_behind(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of the leaves that a backward pass from ``tensors`` reaches."""
    leaves = set()
    nodes = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            nodes.append(tensor.grad_fn)
        elif tensor.requires_grad:
            leaves.add(id(tensor))
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                nodes.append(behind)
    return leaves


def _slots(found: object) -> list[str]:
    """Return the attribute names of classes with slots, such as ``dataclass(slots=True)``."""
    names: list[str] = []
    for cls in type(found).__mro__:
        own = cls.__dict__.get("__slots__", ())
        names += [own] if isinstance(own, str) else own
    return [name for name in names if name not in ("__dict__", "__weakref__")]
