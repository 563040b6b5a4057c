"""A record of the draws of random numbers in a step, keyed by the generator's state before each draw."""

from __future__ import annotations

import hashlib
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pdlcheck.checks.randomness.seeding import told_of_seeding
from pdlcheck.compat.torch.loaders import seeds_no_worker
from pdlcheck.compat.torch.modes import TorchDispatchMode

__all__ = ["GLOBAL", "OF_TORCH", "Draw", "Notes", "Recorder", "code_of", "inside", "others_noted"]

OF_TORCH = "torch"
GLOBAL = {"random": "the random module", "numpy.random": "numpy.random"}  # argument: name in messages
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


class Draw(NamedTuple):
    """The place and step of a draw, and the last seed of ``torch.manual_seed`` before it, on this rank."""

    where: str
    step: int
    seed: int


class Notes:
    """The draws of one rank so far, with their steps.

    Args:
        agreed: functions in which ranks decide together; a draw of torch in one of them is recorded as a decision.
    """

    def __init__(self, agreed: Sequence[Callable[..., Any]] = ()) -> None:
        """Start an empty record."""
        self._agreed = {code_of(function): function for function in agreed}
        self.draws: dict[str, Draw] = {}
        self.decisions: list[tuple[str, str]] = []  # the state of the generator, and the place of the draw
        self.divided: set[str] = set()
        self.decides = False  # whether this rank has drawn from a generator with which ranks agree
        self.again: tuple[str, int, int] | None = None
        self.step = 0
        self.depth = 0  # of nested calls of divided modules

    def add(self, state: str, where: str) -> None:
        """Record a draw that began with this state of a generator."""
        if self._agreed and self._is_agreed():
            self.decisions.append((state, where))
            return
        first = self.draws.setdefault(state, Draw(where, self.step, torch.initial_seed()))
        if self.depth:
            self.divided.add(state)
        if first.step != self.step and self.again is None:
            self.again = where, first.step, self.step

    def _is_agreed(self) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code in self._agreed:
                return True
            frame = frame.f_back
        return False


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """Return the code of a Python function or method, or None for any other callable."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


@contextmanager
def inside(modules: Sequence[nn.Module], notes: Notes) -> Iterator[None]:
    """Count in ``notes.depth`` the forward passes of these modules that are running."""

    def enter(*_: object) -> None:
        notes.depth += 1

    def leave(*_: object) -> None:
        notes.depth -= 1

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


class Recorder(TorchDispatchMode):  # type: ignore[misc]  # its type is not public
    """A dispatch mode that records the state of the global generator before each operation that draws from it.

    Args:
        notes: the record to add to.
        counted: generators of the program whose draws count too.
    """

    def __init__(self, notes: Notes, counted: Sequence[torch.Generator]) -> None:
        """Observe the global generator and the generators ``counted``."""
        super().__init__()
        self._notes = notes
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record it if it draws."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.randperm and not self._counted:
            return func(*args, **kwargs)  # ranks may draw alike here, to agree on a permutation
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        before = _state_of(device)
        result = self._of_its_own(func, args, kwargs) if self._counted else func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.randperm:
            return result
        if _state_of(device) != before and (line := _line()):  # an operation may draw nothing, as dropout with p=0
            self._notes.add(before, f"{func} at {line}")
        return result

    def _of_its_own(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and record each of the counted generators that it advances.

        An operation gets a new generator object in each call. The states identify the generator, so this method
        compares states.
        """
        before = [_text_of(one.get_state(), one.device) for one in self._counted]
        result = func(*args, **kwargs)
        for one, state in zip(self._counted, before, strict=True):
            if _text_of(one.get_state(), one.device) != state:
                self._notes.add(state, f"{func} of a generator at {_line()}")
        return result


def _state_of(device: torch.device) -> str:
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return _text_of(state, device)


def _text_of(state: Tensor, device: torch.device) -> str:
    """Return the state as text.

    The global generator and one of the program with the same state give the same text, because they draw the same
    numbers.
    """
    return f"{OF_TORCH} on {device}: {hashlib.sha256(state.numpy().tobytes()).hexdigest()}"


@contextmanager
def others_noted(notes: Notes, own: Sequence[Any], together: Mapping[str, list[str]]) -> Iterator[None]:
    """Record whether generators of NumPy and Python draw in the body of the ``with`` statement.

    These generators do not report their draws, so their states before and after are compared. If the program sets a
    state in between, the draws before and after that call count separately.

    Args:
        notes: the record to add to.
        own: generators of the program, whose draws count too.
        together: the global generators with which ranks agree, by name; their states at the end are appended.
    """
    began = first = _other_states(own)
    since = ""

    def note_what_has_drawn() -> dict[str, str]:
        now = _other_states(own)
        for name, state in began.items():
            if name not in together and now[name] != state:
                kind = name.partition(",")[0]  # two streams of one kind may have the same state in different places
                notes.add(f"{kind} {state}", name + since)
        return now

    def begin_anew() -> None:
        nonlocal began, since
        began, since = _other_states(own), f", set at {_line()}"

    with told_of_seeding(note_what_has_drawn, begin_anew):
        yield
    last = note_what_has_drawn()
    for name, states in together.items():
        states.append(last[name])
        notes.decides |= last[name] != first[name]


def _other_states(own: Sequence[Any]) -> dict[str, str]:
    states: dict[str, Any] = dict(zip(GLOBAL.values(), (random.getstate(), np.random.get_state()), strict=True))
    for place, one in enumerate(own):
        if isinstance(one, random.Random):
            states[f"the random module, generator {place}"] = one.getstate()
        elif isinstance(one, np.random.RandomState):
            states[f"numpy.random, generator {place}"] = one.get_state()
        else:
            states[f"numpy.random.Generator, generator {place}"] = one.bit_generator.state
    return {name: hashlib.sha256(pickle.dumps(state)).hexdigest() for name, state in states.items()}


def _line() -> str:
    """Return the nearest line of the stack that belongs neither to torch nor to this package.

    The result is empty if a ``DataLoader`` without workers draws a seed, because no worker receives it.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        if seeds_no_worker(frame):
            return ""
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
