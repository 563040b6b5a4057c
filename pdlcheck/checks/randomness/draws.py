"""Notes what draws random numbers in a step, by the state of the generator that each draw begins with."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import dataloader

from pdlcheck.checks.randomness.seeding import told_of_seeding

__all__ = ["GLOBAL", "OF_TORCH", "Draw", "Notes", "Recorder", "code_of", "inside", "others_noted"]

OF_TORCH = "torch"
GLOBAL = {"random": "the random module", "numpy.random": "numpy.random"}  # and what messages call them
_MAKES_WORKERS = dataloader._BaseDataLoaderIter.__init__.__code__
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


class Draw(NamedTuple):
    """Where a generator has drawn, in which step, and the last ``torch.manual_seed`` before, on this rank."""

    where: str
    step: int
    seed: int


class Notes:
    """What has drawn so far, and in which step.

    Args:
        agreed: functions in which ranks decide together: what torch draws there is no draw, but a decision.
    """

    def __init__(self, agreed: Sequence[Callable[..., Any]] = ()) -> None:
        self._agreed = {code_of(function): function for function in agreed}
        self.draws: dict[str, Draw] = {}
        self.decisions: list[tuple[str, str]] = []  # the state of the generator, and where it drew
        self.divided: set[str] = set()
        self.decides = False  # ranks have drawn from a generator by which they agree
        self.again: tuple[str, int, int] | None = None
        self.step = 0
        self.depth = 0  # of divided modules

    def add(self, state: str, where: str) -> None:
        """A draw began with this state of a generator."""
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
    """Of a function or method in Python; None of anything else."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


@contextmanager
def inside(modules: Sequence[nn.Module], notes: Notes) -> Iterator[None]:
    """Note when one of the modules, or one below, runs its forward pass."""

    def enter(*_: object) -> None:
        notes.depth += 1

    def leave(*_: object) -> None:
        notes.depth -= 1

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


class Recorder(TorchDispatchMode):
    """Notes the state of the global generator before each operation that draws from it."""

    def __init__(self, notes: Notes, counted: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.randperm and not self._counted:
            return func(*args, **kwargs)  # ranks may draw alike here, to agree
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        before = _state_of(device)
        result = self._of_its_own(func, args, kwargs) if self._counted else func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.randperm:
            return result
        if _state_of(device) != before and (line := _line()):  # it may draw nothing, as dropout with p=0
            self._notes.add(before, f"{func} at {line}")
        return result

    def _of_its_own(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The generator that comes here is another object each time: what counts is whose state moves on."""
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
    """Alike for the global generator and one of the program's own: they draw the same numbers."""
    return f"{OF_TORCH} on {device}: {hashlib.sha256(state.numpy().tobytes()).hexdigest()}"


@contextmanager
def others_noted(notes: Notes, own: Sequence[Any], together: Mapping[str, list[str]]) -> Iterator[None]:
    """Note whether generators of NumPy and Python draw, which tell nobody: their states before and after differ.

    Where one is set anew in between, what it drew before counts, and what it draws then.

    Args:
        notes: for those that draw.
        own: of the program's own.
        together: those by which ranks agree, by name; their states at the end are added.
    """
    began = first = _other_states(own)
    since = ""

    def note_what_has_drawn() -> dict[str, str]:
        now = _other_states(own)
        for name, state in began.items():
            if name not in together and now[name] != state:
                kind = name.partition(",")[0]  # streams of one kind may begin alike in other places
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
    """The nearest line that is neither torch's nor of this package; none, if a loader draws a seed that nobody gets."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        if frame.f_code is _MAKES_WORKERS and frame.f_locals["self"]._num_workers == 0:
            return ""
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
