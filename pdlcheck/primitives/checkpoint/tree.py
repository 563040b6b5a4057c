"""State dicts as trees, with tensors that are named by their contents.

A tensor that two ranks hold is then stored once, and a tree is small enough to be sent between ranks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pdlcheck.primitives.checkpoint.digest import new_digest
from pdlcheck.tensor_bytes import bytes_of

__all__ = ["Node", "Tensors", "decode", "difference", "encode", "is_tree"]

Node = tuple[str, Any]
Tensors = dict[str, Tensor]

NOTHING: Node = ("value", None)
_VALUES = (bool, int, float, complex, str, bytes, type(None))
_INT_BITS = 2039  # weights_only=True loads no longer int, and no empty bytes
_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def encode(value: object, tensors: Tensors, where: str, like: Node = NOTHING) -> Node:
    """Return ``value`` as a tree, and put its tensors into ``tensors``, which holds them until they change.

    Args:
        value: a state dict, or part of one.
        tensors: by their digests.
        where: the value's name in messages.
        like: a tree with tensors in ``tensors`` that the value may be equal to; equal tensors need no digest.

    Raises:
        TypeError: names the first value that ``weights_only=True`` would not load unchanged.
    """
    if isinstance(value, Tensor):
        return "tensor", _store(value, tensors, where, like)
    if isinstance(value, np.ndarray):
        return "ndarray", _store(_tensor_of(value, where), tensors, where, like)
    if isinstance(value, dict) and type(value).__name__ in _MAPPINGS:
        for key in value:
            if type(key) not in _VALUES:
                raise TypeError(f"{where} has a key of type {type(key).__name__}, a checkpoint takes str and numbers")
            if not _loads_as_it_is(key):
                raise TypeError(f"{where} has a key that weights_only=True does not load: empty bytes, or a huge int")
        likes = dict(like[1]) if like[0] in _MAPPINGS else {}
        nodes = [(k, encode(held, tensors, f"{where}[{k!r}]", likes.get(k, NOTHING))) for k, held in value.items()]
        return type(value).__name__, nodes
    if isinstance(value, list | tuple) and type(value) in (list, tuple):  # not a named tuple: its type would be lost
        likes = dict(enumerate(like[1])) if like[0] in ("list", "tuple") else {}
        children = [encode(held, tensors, f"{where}[{i}]", likes.get(i, NOTHING)) for i, held in enumerate(value)]
        return type(value).__name__, children
    if type(value) in (int, bytes) and not _loads_as_it_is(value):
        return ("int", hex(value)) if isinstance(value, int) else ("bytes", "")
    if type(value) in _VALUES or isinstance(value, np.float64):
        return "value", float(value) if isinstance(value, np.float64) else value
    raise TypeError(
        f"{where} is of type {type(value).__name__}; a checkpoint holds tensors, arrays, dicts, lists, tuples, "
        "numbers and strings, which can be read with weights_only=True"
    )


def decode(node: Node, tensors: Tensors) -> Any:
    """Return the value of a tree. Every tensor is a separate copy: two equal tensors must not become one."""
    kind, held = node
    if kind == "tensor":
        return tensors[held].clone()
    if kind == "ndarray":
        return tensors[held].clone().numpy()
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({key: decode(child, tensors) for key, child in held})
    if kind in ("list", "tuple"):
        children = [decode(child, tensors) for child in held]
        return children if kind == "list" else tuple(children)
    if kind == "int":
        return int(held, 16)
    return b"" if kind == "bytes" else held


def is_tree(node: Any, tensors: Tensors) -> bool:
    """Return whether ``node`` can be decoded, with no other tensors than these."""
    kind, held = node
    if kind in ("tensor", "ndarray"):
        return held in tensors and (kind == "tensor" or isinstance(tensors[held].numpy(), np.ndarray))
    if kind in _MAPPINGS:
        return all(type(key) in _VALUES and is_tree(child, tensors) for key, child in held)
    if kind in ("list", "tuple"):
        return all(is_tree(child, tensors) for child in held)
    if kind == "int":
        return bool(hex(int(held, 16)) == held)
    return kind in ("bytes", "value") and type(held) in _VALUES


def difference(found: Node, expected: Node, where: str) -> str | None:
    """Return a description of the first place where two trees differ; None if they are equal bit for bit."""
    kind, held = expected
    mappings = found[0] in _MAPPINGS and kind in _MAPPINGS
    if found[0] != kind and not mappings:
        return f"{where} is {_kind(found)}, it should be {_kind(expected)}"
    if mappings:
        there, wanted = dict(found[1]), dict(held)
        for key in wanted:
            if key not in there:
                return f"{where}[{key!r}] is missing"
        for key in there:
            if key not in wanted:
                return f"{where}[{key!r}] should not be there"
        pairs = [(there[key], wanted[key], f"{where}[{key!r}]") for key in wanted]
    elif kind in ("list", "tuple"):
        if len(found[1]) != len(held):
            return f"{where} has {len(found[1])} entries, it should have {len(held)}"
        pairs = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(found[1], held, strict=True))]
    elif kind in ("tensor", "ndarray"):
        return None if found[1] == held else f"{where} holds other values"
    else:
        same = type(found[1]) is type(held) and repr(found[1]) == repr(held)
        return None if same else f"{where} is {_kind(found)}, it should be {_kind(expected)}"
    return next((text for text in (difference(*pair) for pair in pairs) if text), None)


def _loads_as_it_is(value: object) -> bool:
    """Return whether torch's unpickler, which supports a part of pickle, can read this number or these bytes."""
    if isinstance(value, int):
        return value.bit_length() <= _INT_BITS
    return not isinstance(value, bytes) or bool(value)


def _kind(node: Node) -> str:
    return {"value": repr(node[1]), "int": str(node[1]), "bytes": "b''"}.get(node[0], f"a {node[0]}")


def _store(tensor: Tensor, tensors: Tensors, where: str, like: Node) -> str:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise TypeError(
            f"{where} is a {type(tensor).__name__}; a checkpoint takes plain tensors: a lazy one needs a forward pass "
            "first, a sharded one torch.distributed.checkpoint"
        )
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "on the meta device" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
        raise TypeError(f"{where} is a tensor {kind}; a checkpoint takes dense tensors that hold values")
    held = tensor.detach().cpu().resolve_conj().resolve_neg()
    if held.untyped_storage().nbytes() != held.nbytes:
        held = held.clone()  # a view would be saved with the whole storage behind it
    if like[0] in ("tensor", "ndarray") and _are_equal(held, tensors[like[1]]):
        return str(like[1])
    digest = new_digest(f"{held.dtype} {tuple(held.shape)} ".encode())  # equal values may differ in strides
    digest.update(bytes_of(held).numpy().data)
    name = digest.hexdigest()
    tensors[name] = held
    return name


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit."""
    same = one.dtype == other.dtype and one.shape == other.shape
    # numpy compares bytes much faster than torch.equal does
    return same and np.array_equal(bytes_of(one).numpy(), bytes_of(other).numpy())


def _tensor_of(array: Any, where: str) -> Tensor:
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError):  # ValueError: an array of the other byte order
        raise TypeError(f"{where} is an array of {array.dtype}, which torch has no dtype for") from None
