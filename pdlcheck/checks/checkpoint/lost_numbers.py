"""The numbers that a program keeps: in objects, functions and containers, and in its own random streams."""

from __future__ import annotations

import collections
import copy
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pdlcheck.checks.checkpoint.object_graph import Reached, is_of_the_program, reached

__all__ = ["IN_CONTAINERS", "NUMBERS", "numbers_reached"]

NUMBERS = "the numbers "  # the prefix of the names of such parts
IN_CONTAINERS = f"{NUMBERS}in "
_KINDS = (bool, int, float, str)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_MOST = 4096  # entries; a larger container is data

State = dict[Any, bool | int | float | str]


class OfObject:
    """The numbers and strings among the attributes of an object of the program, such as a trainer's epoch.

    Class attributes count too, because they are the initial values. Base classes from other modules do not count.
    """

    def __init__(self, holder: object) -> None:
        self._holder = holder

    def state_dict(self) -> State:
        classes = [one for one in type(self._holder).__mro__ if one.__module__ == type(self._holder).__module__]
        held = [(name, value) for one in reversed(classes) for name, value in vars(one).items() if name[:2] != "__"]
        return {name: value for name, value in [*held, *vars(self._holder).items()] if type(value) in _KINDS}

    def load_state_dict(self, state: State) -> None:
        now = self.state_dict()
        vars(self._holder).update({name: value for name, value in state.items() if now.get(name, self) != value})


class OfFunction:
    """The numbers and strings that a function shares with its enclosing function.

    An example is a step counter that the function declares as ``nonlocal``.
    """

    def __init__(self, function: Any, known: set[int]) -> None:
        pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        self._cells = {name: cell for name, cell in pairs if id(cell) not in known}
        known.update(map(id, self._cells.values()))

    def state_dict(self) -> State:
        return {name: cell.cell_contents for name, cell in self._cells.items() if type(_contents(cell)) in _KINDS}

    def load_state_dict(self, state: State) -> None:
        for name, value in state.items():
            self._cells[name].cell_contents = value


class OfContainer:
    """A list, deque or dict that holds only numbers and strings, such as the last losses.

    An empty one counts too, because it may be made to hold them.
    """

    def __init__(self, held: Any) -> None:
        self._held = held

    def state_dict(self) -> State:
        return dict(self._held if isinstance(self._held, dict) else enumerate(self._held))

    def load_state_dict(self, state: State) -> None:
        self._held.clear()
        if isinstance(self._held, dict):
            self._held.update(state)
        else:
            self._held.extend(state.values())


class OfGenerator:
    """A random stream of the program's own, from Python's ``random`` or from NumPy."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self._generator, random.Random):
            version, words, left = self._generator.getstate()
            return {"version": version, "state": np.array(words), "left": left}
        if isinstance(self._generator, np.random.RandomState):
            return {"state": copy.deepcopy(self._generator.get_state(legacy=False))}
        return {"state": copy.deepcopy(self._generator.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self._generator, random.Random):
            self._generator.setstate((state["version"], tuple(state["state"].tolist()), state["left"]))
        elif isinstance(self._generator, np.random.RandomState):
            self._generator.set_state(state["state"])
        else:
            self._generator.bit_generator.state = state["state"]


def numbers_reached(functions: tuple[Callable[..., object], ...]) -> Iterator[Reached]:
    """Yield the numbers that ``functions`` reach, named after classes and functions.

    The attributes of an object count too if one of ``functions`` is its method. A resumed run may count its own steps.
    These numbers therefore only explain why a run diverges, and are no state by themselves.
    """
    bound = [getattr(function, "__self__", None) for function in functions if inspect.ismethod(function)]
    everything = reached(functions)
    holders = {id(one): one for one in [*bound, *(one.held for one in everything)] if is_of_the_program(one)}
    for holder in holders.values():
        if not isinstance(holder, dict | list) and OfObject(holder).state_dict():
            name = f"{NUMBERS}of {type(holder).__name__}"
            yield Reached(name, name, OfObject(holder))
    cells: set[int] = set()
    own = [function for function in [*functions, *(one.held for one in everything)] if inspect.isfunction(function)]
    for function in own:
        found = OfFunction(function, cells)
        if found.state_dict():
            name = f"{NUMBERS}of {function.__name__}"
            yield Reached(name, f"{NUMBERS}of {function.__qualname__}", found)
    drawn_from = {id(one.held): one for one in everything if isinstance(one.held, _GENERATORS)}
    for one in drawn_from.values():
        name, long_name = (f"{NUMBERS}that {label} draws" for label in (one.name, one.long_name))
        yield Reached(name, long_name, OfGenerator(one.held))
    containers = {id(one.held): one for one in everything if _is_of_numbers(one.held)}
    for one in containers.values():
        yield Reached(f"{IN_CONTAINERS}{one.name}", f"{IN_CONTAINERS}{one.long_name}", OfContainer(one.held))


def _is_of_numbers(held: Any) -> bool:
    if type(held) not in (list, dict, collections.deque) or len(held) > _MOST:
        return False
    return all(type(value) in _KINDS for value in (held.values() if isinstance(held, dict) else held))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is not bound yet
        return None
