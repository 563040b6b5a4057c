"""Per-rank state: what torch and Python keep for the whole process, swapped so that each rank has its own.

Swapped at every switch (all modules are in this folder):

- the random streams of torch, of CUDA devices that are in use (``device_streams.py``), of numpy and of Python;
- the default dtype;
- the environment;
- where warnings and text go (``diverted.py``);
- what context managers and global hooks of torch have set (``torchs_own.py``, ``flags.py``).

Grad mode, autocast, inference mode and the default device are per thread in torch already, and context variables are
per thread in Python. Ranks start with the controller's (``of_thread.py``).

Not swapped: the module globals of the user's code, and everything that can be reached from them. The exceptions are the
modules that a world's ``own_globals`` names (``modules.py`` in ``module_globals/``). If one rank sees in such a global
what another rank has put there, the program ends differently on processes.

:func:`pdlcheck.worlds.check_same_on_worlds`, and pytest in a session on ``sim`` and on processes, report verdicts that
differ. They find the responsible globals by an experiment: a simulated run exchanges globals at each switch (``run.py``
in ``module_globals/``). If it ends as processes did when only one global is exchanged, that global is named. The same
constant set on every rank, a log, or a late import makes no difference and is not named. A global model raises an error
if two ranks compute its gradients at the same time (:mod:`pdlcheck.worlds.simulated.network.backward`).

That run is an imitation. It does not exchange:

- the state of installed packages and of the standard library (a rank's logging set-up applies to every rank);
- objects with ``__slots__``, generators, iterators other than ``itertools.count``, files and locks;
- tensors inside tuples or above 16 MiB;
- containers of more than 10 000 items, and what is reached only after the first 20 000 objects.

Caches of ``lru_cache`` start empty. Changes that fixtures of ranks make to globals stay shared, and so do default
arguments that are tensors. Test and pool start from the modules as collected: what earlier tests left on the processes
is unknown here. Sessions of pytest-xdist do not compare, because a worker sees the verdicts of one world.
"""

from __future__ import annotations

import contextvars
import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pdlcheck.worlds.nesting import INSIDE
from pdlcheck.worlds.simulated.process_state import device_streams, flags, stdio, thread_settings, torch_globals
from pdlcheck.worlds.simulated.process_state.device_streams import DeviceStreams
from pdlcheck.worlds.simulated.process_state.gauss_cache import cached_gauss, set_cached_gauss
from pdlcheck.worlds.simulated.process_state.patches import NO_PATCHES, put_patches, take_controllers, take_patches
from pdlcheck.worlds.simulated.process_state.streams import python_stream, set_python_stream

__all__ = ["Observer", "Own", "RankState", "isolated_controller"]

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_ALL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", INSIDE: "1"}  # no process listens at that address
_environment: Any = os.environb if os.supports_bytes_environ else os.environ  # os.environ takes twice as long
_variables: Any = getattr(_environment, "_data", _environment)  # the same, as a plain dict if Python has one
_set_numpy = getattr(np.random, "set_bit_generator")  # noqa: B009 - its type stub does not export it
_get_numpy = getattr(np.random, "get_bit_generator")  # noqa: B009
observer: Observer | None = None  # set while a run is diagnosed
_everybodys: dict[Any, Any] = {}  # the controller's environment at the start of the run
_generators: list[np.random.MT19937] = []  # one for each rank: making one takes longer than a small run


def _generator_of(rank: int) -> np.random.MT19937:
    while len(_generators) <= rank:
        _generators.append(np.random.MT19937())
    return _generators[rank]


@functools.cache
def _environment_of(rank: int, world_size: int) -> dict[Any, Any]:
    own = zip(_RANK_VARIABLES, map(str, (rank, rank, world_size, world_size)), strict=True)
    encode = os.fsencode if _environment is not os.environ else str
    return {encode(name): encode(value) for name, value in own}


class Observer(Protocol):
    """An observer of the ranks' turns; see :mod:`pdlcheck.worlds.simulated.module_globals.run`."""

    def arrive(self, rank: int) -> None:
        """Observe that ``rank`` has the turn now; -1 is the controller."""

    def call(self, fn: Callable[..., Any]) -> None:
        """Observe that the controller is about to call ``fn`` on the ranks."""


class Own(Protocol):
    """Additional state that is in force while one rank runs."""

    def leave(self) -> None:
        """Take the state back, because the rank gives up its turn or has ended."""

    def arrive(self) -> None:
        """Put the state in force again, because the rank goes on or starts anew."""


class _First(NamedTuple):
    """The state that a run of one rank begins with."""

    torch: Tensor
    devices: DeviceStreams
    python: Any
    numpy: Any
    dtype: torch.dtype


class RankState:
    """The per-rank state of one rank while another rank runs."""

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self._rank = rank
        self._seed = seed * 10_007 + rank  # ranks start with different streams
        self._numpy = _generator_of(rank)
        self._environment = _environment_of(rank, world_size)
        self._kept: stdio.StdioState | None = None
        self._first: _First | None = None  # None: a run begins with the seed
        self._changed: dict[Any, Any] = {}  # variables that the rank's code has changed; None: removed
        self._given: thread_settings.Settings | None = None  # the controller's settings that this rank has taken over
        self._base: contextvars.Context | None = None
        self.context = contextvars.Context()  # the context of the rank's code
        self._patches = NO_PATCHES
        self.own: list[Own] = []  # added while the rank runs
        self.signal_handlers: dict[int, Any] = {}  # by signal number
        self.leaves_streams = False  # whether all ranks get its text streams at the end of this run
        self.begins_here = False  # whether later runs start from the random numbers and the dtype this run ends with
        self._is_here = False  # whether the process has this rank's state now

    def enter(self) -> None:
        """Put the rank's state in force at the start of a run."""
        self._is_here = True
        _set_numpy(self._numpy)
        if self._first is None:
            torch.default_generator.manual_seed(self._seed)
            self._devices = DeviceStreams(self._seed)
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
        else:
            torch.default_generator.set_state(self._first.torch)
            self._devices = self._first.devices.copy()
            set_python_stream(self._first.python)
            np.random.set_state(self._first.numpy)
        self._devices.put()
        self._take_over()
        torch.set_num_threads(1)  # for this thread only
        self._plain = _everybodys | self._environment
        self._set_environment()
        stdio.begin(self._kept)
        self._began = torch_globals.begin()
        self._python = python_stream()
        if observer is not None:
            observer.arrive(self._rank)
        if self._patches:
            put_patches(self._patches)
        for own in self.own:
            own.arrive()

    def _take_over(self) -> None:
        """Take over the controller's settings, or those that have changed since the last run of this rank."""
        settings, context = thread_settings.of_controller()
        if self._first is not None and (self._given is None or settings.dtype is self._given.dtype):
            torch.set_default_dtype(self._first.dtype)
        elif torch.get_default_dtype() is not settings.dtype:
            torch.set_default_dtype(settings.dtype)
        if self._given is None or not settings.is_as(self._given):
            thread_settings.put(settings, dtype=False)
        flags.put(self._flags if self._given is not None and settings.flags == self._given.flags else settings.flags)
        if self._base is None:
            self.context = thread_settings.own_variables(context)
        else:
            self.context.run(thread_settings.put_variables, context, self._base)
        self._given, self._base = settings, context

    def save(self) -> None:
        """Save the rank's state, because the rank gives up its turn."""
        for own in reversed(self.own):
            own.leave()
        self._patches = take_patches()
        self._take_environment()
        self._is_here = False
        self._torch = torch.default_generator.get_state()
        self._devices.take()
        self._python = python_stream(self._python)
        self._normal = cached_gauss()
        self._dtype = torch.get_default_dtype()
        self._diverted = stdio.present()
        self._flags = flags.present()
        self._torchs_own = torch_globals.present()
        torch_globals.put_back()

    def restore(self) -> None:
        """Put the saved state in force, because the rank has its turn again."""
        self._is_here = True
        torch.default_generator.set_state(self._torch)
        self._devices.put()
        set_python_stream(self._python)
        _set_numpy(self._numpy)
        set_cached_gauss(self._normal)
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)
        self._set_environment()
        flags.put(self._flags)
        stdio.put_back(self._diverted)
        torch_globals.put_back(self._torchs_own)
        if observer is not None:
            observer.arrive(self._rank)
        if self._patches:
            put_patches(self._patches)
        for own in self.own:
            own.arrive()

    def leave(self) -> None:
        """Save what the rank keeps for its next run, because the rank has ended."""
        for own in reversed(self.own):
            own.leave()
        self._patches = take_patches()
        self._take_environment()
        self._is_here = False
        self.left = thread_settings.present()
        self._flags = self.left.flags
        self._devices.take()
        if self.begins_here:
            numpy, state = np.random.get_state(), torch.default_generator.get_state()
            self._first = _First(state, self._devices, python_stream(), numpy, torch.get_default_dtype())
        self._kept = stdio.end(leaves=self.leaves_streams)
        torch_globals.end(self._began)

    def take_back(self) -> None:
        """Undo the changes of a rank that was given up in its turn. Called in the controller."""
        if self._is_here:
            self._is_here = False
            for undo in (*(own.leave for own in reversed(self.own)), take_patches, self._take_environment):
                with suppress(Exception):  # the rank may have been interrupted while it undid this itself
                    undo()

    def give_to_controller(self) -> None:
        """Make the changes of this rank the controller's, and so every rank's. Called in the controller after a run."""
        assert self._given is not None
        assert self._base is not None
        _change(self._changed)
        self._changed = {}
        put_patches(self._patches)
        self._patches = NO_PATCHES
        if not self.left.is_as(self._given):
            thread_settings.put(self.left)
        thread_settings.put_variables(self.context, self._base)

    def _set_environment(self) -> None:
        for name, value in self._environment.items():
            if _variables.get(name) != value:  # half of them are equal on all ranks, and setting one takes long
                _environment[name] = value
        if self._changed:
            _change(self._changed)

    def _take_environment(self) -> None:
        """Save and undo the changes that the rank's code has made.

        The launcher's variables are set for each turn.
        """
        if _variables == self._plain:
            if self._changed:
                self._changed = {}
            return
        plain = self._plain
        self._changed = {name: value for name, value in _variables.items() if plain.get(name) != value}
        self._changed |= dict.fromkeys(plain.keys() - _variables.keys())
        _change({name: plain.get(name) for name in self._changed})


def _change(changes: dict[Any, Any]) -> None:
    """Apply changes to the environment. None removes a variable."""
    for name, value in changes.items():
        if value is not None:
            _environment[name] = value
        elif name in _variables:
            del _environment[name]


@contextmanager
def isolated_controller() -> Iterator[None]:
    """Restore, after the block, the controller's state that ranks change."""
    torch_state, python_state = torch.default_generator.get_state(), python_stream()
    numpy_generator, normal, threads = _get_numpy(), cached_gauss(), torch.get_num_threads()
    dtype, set_flags, hook = torch.get_default_dtype(), flags.present(), sys.excepthook
    thread_settings.remember_controllers()
    environment = {name: os.environ.get(name) for name in (*_RANK_VARIABLES, *_OF_ALL)}
    os.environ.update((name, value) for name, value in _OF_ALL.items() if environment[name] != value)
    _everybodys.clear()
    _everybodys.update(_variables)
    take_controllers()
    try:
        with stdio.controllers(), torch_globals.controllers(), device_streams.of_controller():
            yield
    finally:
        if observer is not None:
            observer.arrive(-1)
        torch.default_generator.set_state(torch_state)
        set_python_stream(python_state)
        _set_numpy(numpy_generator)
        set_cached_gauss(normal)
        torch.set_default_dtype(dtype)
        flags.put(set_flags)
        torch.set_num_threads(threads)  # a rank's number would be the default of later threads
        sys.excepthook = hook  # init_process_group puts its own hook in front, once for each rank
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
