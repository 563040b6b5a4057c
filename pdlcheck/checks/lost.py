"""What a training needs to go on, besides its weights: found in what its functions hold, and put back by experiment."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pdlcheck.checks.held import bits

__all__ = ["STREAMS", "first_difference", "parts_of", "put_back", "seed_streams", "states_of"]

STREAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "the random numbers of torch": (torch.get_rng_state, torch.set_rng_state),
    "the random numbers of Python": (random.getstate, random.setstate),
    "the random numbers of numpy": (np.random.get_state, np.random.set_state),
}


def seed_streams(seed: int) -> None:
    """Start every global random stream of this rank from ``seed``."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def parts_of(model: nn.Module, functions: tuple[Callable[..., object], ...]) -> dict[str, Any]:
    """The objects with a state that ``functions`` reach, by the names that the functions have for them.

    Closures, globals that are named, bound objects and their attributes, arguments of a partial; containers one level
    deep. What shares parameters with ``model`` is the model.
    """
    own = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    found: dict[str, Any] = {}
    for function in functions:
        for name, held in _reached(function):
            if isinstance(held, nn.Module) and any(id(tensor) in own for tensor in held.parameters()):
                continue
            if held is not model and _has_state(held) and not any(held is other for other in found.values()):
                found.setdefault(name, held)
    return found


def states_of(parts: dict[str, Any]) -> dict[str, Any]:
    """Copies of the states of the streams and the parts; what cannot be copied is left out."""
    states: dict[str, Any] = {name: copy.deepcopy(get()) for name, (get, _) in STREAMS.items()}
    for name, held in parts.items():
        try:
            states[name] = pickle.loads(pickle.dumps(_state(held)))  # it travels to the controller
        except Exception:
            continue
    return states


def put_back(parts: dict[str, Any], states: dict[str, Any], names: list[str]) -> None:
    """Give the named parts and streams these states."""
    for name in names:
        if name in STREAMS:
            STREAMS[name][1](states[name])
        elif isinstance(parts[name], torch.Generator):
            parts[name].set_state(states[name])
        else:
            parts[name].load_state_dict(copy.deepcopy(states[name]))


def first_difference(found: Any, expected: Any, where: str = "") -> str | None:
    """The first place where two states differ, in words; None where they are the same bit for bit."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        found, expected = _own(found), _own(expected)
        if (found.shape, found.dtype) != (expected.shape, expected.dtype) or not torch.equal(
            bits(found), bits(expected)
        ):
            return f"{where} holds other values" if where else "other values"
        return None
    if isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        return None if found.tobytes() == expected.tobytes() else f"{where} holds other values"
    if isinstance(found, dict) and isinstance(expected, dict):
        missing = [key for key in expected if key not in found]
        if missing:
            return f"{where}[{missing[0]!r}] is missing"
        added = [key for key in found if key not in expected]
        if added:
            return f"{where}[{added[0]!r}] should not be there"
        pairs = [(found[key], expected[key], f"{where}[{key!r}]") for key in expected]
    elif isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return f"{where} has {len(found)} entries instead of {len(expected)}"
        pairs = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        same = type(found) is type(expected) and repr(found) == repr(expected)
        return None if same else f"{where} is {found!r} instead of {expected!r}"
    return next((text for text in (first_difference(*pair) for pair in pairs) if text), None)


def _own(tensor: Any) -> Tensor:
    """Dense, and of a DTensor the shard of this rank, as states are compared where no process group is."""
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held if held.layout == torch.strided else held.to_dense()


def _state(held: Any) -> Any:
    return held.get_state() if isinstance(held, torch.Generator) else held.state_dict()


def _has_state(held: object) -> bool:
    if inspect.isclass(held) or inspect.ismodule(held):
        return False
    return isinstance(held, torch.Generator) or all(
        callable(getattr(held, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _reached(function: Any) -> Iterator[tuple[str, Any]]:
    for name, held in _named(function):
        yield name, held
        if isinstance(held, dict):
            yield from ((str(key), value) for key, value in held.items())
        elif isinstance(held, (list, tuple)):
            yield from ((f"{name}[{i}]", value) for i, value in enumerate(held))
        elif inspect.isfunction(held):  # a helper beside it, one level deep
            yield from _named(held)


def _named(function: Any) -> Iterator[tuple[str, Any]]:
    while isinstance(function, functools.partial):
        yield from function.keywords.items()
        yield from ((f"argument {i}", value) for i, value in enumerate(function.args))
        function = function.func
    holder = getattr(function, "__self__", None) if inspect.ismethod(function) else function
    if holder is not None and not inspect.isroutine(holder):
        yield from getattr(holder, "__dict__", {}).items()
        function = getattr(function if inspect.ismethod(function) else type(function).__call__, "__func__", None)
    if not inspect.isfunction(function):
        return
    try:
        around = inspect.getclosurevars(function)
    except ValueError:  # a name that is not bound yet
        return
    yield from around.nonlocals.items()
    yield from around.globals.items()
