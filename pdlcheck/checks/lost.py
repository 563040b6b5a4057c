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
from torch.utils.data import DataLoader

from pdlcheck.checks.held import bits

__all__ = [
    "NUMBERS",
    "STREAMS",
    "Gradients",
    "first_difference",
    "is_no_state",
    "numbers_of",
    "parts_of",
    "put_back",
    "seed_streams",
    "states_of",
]

NUMBERS = "the numbers of "
STREAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "the random numbers of torch": (torch.get_rng_state, torch.set_rng_state),
    "the random numbers of Python": (random.getstate, random.setstate),
    "the random numbers of numpy": (np.random.get_state, np.random.set_state),
}


class Gradients:
    """Those of ``model``, which a step finds where they accumulate over steps, as something with a state."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.grad = state.get(name)


class Numbers:
    """The numbers and texts among the attributes of an object of the program, such as a trainer's epoch."""

    def __init__(self, holder: object) -> None:
        self._holder = holder

    def state_dict(self) -> dict[str, bool | int | float | str]:
        return {name: value for name, value in vars(self._holder).items() if type(value) in (bool, int, float, str)}

    def load_state_dict(self, state: dict[str, bool | int | float | str]) -> None:
        vars(self._holder).update(state)


class Entries(dict[Any, Any]):
    """What a plain dict or list of tensors and numbers holds: by key, or by place where keys are objects."""


def seed_streams(seed: int) -> None:
    """Start every global random stream of this rank from ``seed``."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def parts_of(model: nn.Module, functions: tuple[Callable[..., object], ...]) -> dict[str, Any]:
    """The objects with a state that ``functions`` reach, by the names that the functions have for them.

    Closures, globals that are named, bound objects and their attributes, arguments of a partial; one level deep what
    containers, and objects of the program's own without a state, hold. Plain dicts and lists of tensors are among them;
    as a step may replace one, ask again before each use. What shares parameters with ``model`` is the model. No part is
    a generator from which a loader draws but a seed whenever a pass begins: a run that goes on begins one more.
    """
    own = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    places = {_place(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    reached = [pair for function in functions for pair in _reached(function)]
    seeds = {id(held.generator) for _, held in reached if isinstance(held, DataLoader) and not _shuffles(held)}
    found: dict[str, Any] = {}
    for name, held in reached:
        is_model = isinstance(held, nn.Module) and any(id(tensor) in own for tensor in held.parameters())
        if is_model or id(held) in seeds:
            continue
        entries = _entries(held) or Entries()
        if any(_place(entry) in places for entry in entries.values() if isinstance(entry, Tensor)):
            continue
        plain = isinstance(held, dict | list)
        if held is not model and (plain or _has_state(held)) and not any(held is one for one in found.values()):
            found.setdefault(name, held)
    return found


def numbers_of(functions: tuple[Callable[..., object], ...]) -> dict[str, Any]:
    """The :class:`Numbers` of objects whose methods ``functions`` are, or that these hold; by the names of classes.

    A run that goes on may count its own steps: they tell why it goes elsewhere, and are no state by themselves.
    """
    bound = [getattr(function, "__self__", None) for function in functions if inspect.ismethod(function)]
    held = [one for function in functions for _, one in _reached(function)]
    found: dict[str, Any] = {}
    for holder in [*bound, *held]:
        if _is_of_the_program(holder) and not isinstance(holder, dict | list) and Numbers(holder).state_dict():
            found.setdefault(f"{NUMBERS}{type(holder).__name__}", Numbers(holder))
    return found


def states_of(parts: dict[str, Any]) -> dict[str, Any]:
    """Copies of the states of the streams and the parts; what has none, or cannot be copied, is left out."""
    states: dict[str, Any] = {name: copy.deepcopy(get()) for name, (get, _) in STREAMS.items()}
    for name, held in parts.items():
        try:
            state = pickle.loads(pickle.dumps(_state(held)))  # it travels to the controller
        except Exception:
            continue
        if state is not None:
            states[name] = state
    return states


def is_no_state(found: Any, before: Any, after: Any) -> bool:
    """Whether a plain dict or list is a constant, as steps leave what they found ``before``, or a log, of which a run
    that was resumed has ``found`` other entries than there are ``after`` one without a stop.
    """
    if not isinstance(after, Entries):
        return False
    return not isinstance(found, Entries) or found.keys() != after.keys() or not first_difference(before, after)


def put_back(parts: dict[str, Any], states: dict[str, Any], names: list[str]) -> None:
    """Give the named parts and streams these states."""
    for name in names:
        if name not in states or name not in {*STREAMS, *parts}:
            continue
        if name in STREAMS:
            STREAMS[name][1](states[name])
        elif isinstance(states[name], Entries):
            _put_entries(parts[name], states[name])
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


def _place(tensor: Tensor) -> int:
    """Where its memory is; equal for what shares memory from its first element on."""
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (held.data_ptr() if held.layout == torch.strided else 0) or id(tensor)


def _entries(held: Any) -> Entries | None:
    """What a plain dict or list holds, if that is tensors, and numbers perhaps."""
    if _has_state(held) or not isinstance(held, dict | list):
        return None
    pairs = list(held.items() if isinstance(held, dict) else enumerate(held))
    kinds = {Tensor if isinstance(value, Tensor) else type(value) for _, value in pairs}
    if Tensor not in kinds or kinds - {Tensor, bool, int, float, type(None)}:
        return None
    return Entries({key if isinstance(key, str | int) else i: value for i, (key, value) in enumerate(pairs)})


def _put_entries(held: Any, entries: Entries) -> None:
    for place, (label, value) in enumerate(copy.deepcopy(entries).items()):
        if isinstance(held, list):
            held[place : place + 1] = [value]
        elif label in held or isinstance(label, str):
            held[label] = value


def _state(held: Any) -> Any:
    if isinstance(held, dict | list) and not _has_state(held):
        return _entries(held)
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
            for place, (key, value) in enumerate(held.items()):
                yield key if isinstance(key, str) else f"{name}[{place}]", value
        elif isinstance(held, (list, tuple)):
            yield from ((f"{name}[{i}]", value) for i, value in enumerate(held))
        elif inspect.isfunction(held):  # a helper beside it, one level deep
            yield from _named(held)
        elif _is_of_the_program(held):
            yield from ((f"{name}.{key}", value) for key, value in vars(held).items())


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Whether the order of the samples comes from the loader's generator."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(getattr(sampler, "generator", None) is loader.generator for sampler in samplers)


def _is_of_the_program(held: Any) -> bool:
    """Whether it is an object that holds others, such as a trainer, and has no state by itself."""
    library = type(held).__module__.partition(".")[0] in ("numpy", "torch")
    return hasattr(held, "__dict__") and not (
        library or inspect.isclass(held) or inspect.ismodule(held) or inspect.isroutine(held) or _has_state(held)
    )


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
