"""Tensors inside lists, tuples, dicts and dataclasses: a walk through several structures of the same form."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["map_nested"]

Leaf = Callable[[list[Any], str], Any]


def map_nested(leaf: Leaf, values: Sequence[Any], path: str) -> Any:
    """Return one structure of the form of ``values``, with ``leaf([value, ...], path)`` in place of each non-container.

    Containers are lists, tuples, named tuples, mappings and dataclasses. They keep their type.

    Args:
        leaf: called with the values of all structures at one place, and the name of the place.
        values: structures of the same form, one or more.
        path: the name of the whole structure in messages, such as ``args``.

    Raises:
        TypeError: a packed sequence, whose rows are not samples; or types differ at one place.
        ValueError: lengths or keys differ at one place.

    Example:
        >>> map_nested(lambda pair, path: sum(pair), [{"a": [1, 2]}, {"a": [10, 20]}], "sums")
        {'a': [11, 22]}
    """
    first = values[0]
    if isinstance(first, PackedSequence):
        raise TypeError(
            f"{path} is a PackedSequence, whose rows are time steps of several samples; "
            "pass the padded tensor and the lengths, and pack and unpack inside forward"
        )
    kinds = [type(value).__name__ for value in values]
    if isinstance(first, Tensor) or not _is_container(first):
        return leaf(list(values), path)
    if len(set(kinds)) > 1:
        raise TypeError(f"{path} is {_each(kinds)}; it must be of one type on every worker")
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        parts = {n: map_nested(leaf, [getattr(v, n) for v in values], f"{path}.{n}") for n in names}
        return dataclasses.replace(first, **parts)  # type: ignore[type-var]  # an instance, not a class
    if isinstance(first, Mapping):
        return _mapping(leaf, values, path)
    if len({len(value) for value in values}) > 1:
        raise ValueError(f"{path} has {_each([len(v) for v in values])} entries; it must be as long on every worker")
    entries = [map_nested(leaf, column, f"{path}[{i}]") for i, column in enumerate(zip(*values, strict=True))]
    return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)


def _is_container(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _mapping(leaf: Leaf, values: Sequence[Any], path: str) -> Any:
    first = values[0]
    keys = [sorted(map(repr, value)) for value in values]
    if any(other != keys[0] for other in keys):
        raise ValueError(f"{path} has keys {_each(keys)}; they must be the same on every worker")
    parts = {key: map_nested(leaf, [value[key] for value in values], f"{path}[{key!r}]") for key in first}
    if not isinstance(first, MutableMapping):
        return parts
    result = copy.copy(first)  # keeps the type, and the default of a defaultdict
    result.update(parts)
    return result


def _each(values: Sequence[Any]) -> str:
    """Return a text such as ``3 on worker 0, 2 on worker 1``."""
    return ", ".join(f"{value} on worker {i}" for i, value in enumerate(values))
