"""What belongs to a rank although torch and Python keep it for the whole process.

Swapped at every switch: the random streams of torch, those of CUDA devices that are in use (``device_streams.py``, all
in this folder), numpy and Python, the default dtype, the environment, where warnings and text go (``diverted.py``),
what context managers and global hooks of torch have set (``torchs_own.py``, ``flags.py``). Grad mode, autocast,
inference mode and the default device are per thread in torch already, as context variables are in Python; ranks begin
with the controller's (``of_thread.py``).

Not swapped, but for the modules that a world's ``own_globals`` names (``modules.py`` in ``own_globals/``):
the module globals of the user's code, and what can be reached from them. A program that lets one rank see
what another has put there ends otherwise on processes. :func:`pdlcheck.worlds.check_same_on_worlds`, and pytest in a
session on ``sim`` and on processes, tell so where verdicts differ, and find out by experiment which globals it takes:
a simulated run in which they are exchanged at each switch (``run.py`` in ``own_globals/``) must end as
processes did, with one of them alone. Setting the same constant on every rank, a log or a late import makes no
difference and is not named. A global model whose gradients two ranks compute at a time is refused
(:mod:`pdlcheck.worlds.simulated.network.backward`).

That run is an imitation. It does not exchange what installed packages and the standard library hold (a rank's logging
set-up is everybody's), objects with ``__slots__``, generators, iterators other than ``itertools.count``, files and
locks, tensors inside tuples or above 16 MiB, containers of more than 10 000 items and what lies behind the first 20 000
objects; caches of ``lru_cache`` start empty. What fixtures of ranks do to globals stays shared, and so do default
arguments that are tensors. Test and pool start from the modules as collected: what earlier tests left on the processes
is unknown here. Sessions of pytest-xdist do not compare, as a worker sees the verdicts of one world.
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
from pdlcheck.worlds.simulated.own import device_streams, diverted, flags, of_thread, torchs_own
from pdlcheck.worlds.simulated.own.device_streams import DeviceStreams
from pdlcheck.worlds.simulated.own.normals import kept_normal, set_kept_normal
from pdlcheck.worlds.simulated.own.patches import NO_PATCHES, put_patches, take_controllers, take_patches
from pdlcheck.worlds.simulated.own.streams import python_stream, set_python_stream

__all__ = ["Observer", "Own", "RankState", "isolated_controller"]

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_ALL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", INSIDE: "1"}  # nobody listens at that address
_environment: Any = os.environb if os.supports_bytes_environ else os.environ  # which takes twice as long
_variables: Any = getattr(_environment, "_data", _environment)  # the same, where it can be read as a plain dict
_set_numpy = getattr(np.random, "set_bit_generator")  # noqa: B009 - its type stub does not export it
_get_numpy = getattr(np.random, "get_bit_generator")  # noqa: B009
observer: Observer | None = None  # while a run is diagnosed
_everybodys: dict[Any, Any] = {}  # the controller's environment, as the run began
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
    """Follows the turns of the ranks; see :mod:`pdlcheck.worlds.simulated.own_globals.run`."""

    def arrive(self, rank: int) -> None:
        """``rank`` has the turn now; it is -1 for the controller."""

    def call(self, fn: Callable[..., Any]) -> None:
        """The controller is about to call ``fn`` on the ranks."""


class Own(Protocol):
    """Something more that is in force while one rank runs."""

    def leave(self) -> None:
        """Take it back: the rank gives up its turn, or has ended."""

    def arrive(self) -> None:
        """Do it again: the rank goes on, or starts anew."""


class _First(NamedTuple):
    """What a run of one rank begins with."""

    torch: Tensor
    devices: DeviceStreams
    python: Any
    numpy: Any
    dtype: torch.dtype


class RankState:
    """The process-wide state of one rank, while another rank runs."""

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self._rank = rank
        self._seed = seed * 10_007 + rank  # ranks start with different streams
        self._numpy = _generator_of(rank)
        self._environment = _environment_of(rank, world_size)
        self._kept: diverted.Diverted | None = None
        self._first: _First | None = None  # else a run begins with the seed
        self._changed: dict[Any, Any] = {}  # of the environment, by the rank's code; None: taken out
        self._given: of_thread.Settings | None = None  # the controller's that this rank has taken over
        self._base: contextvars.Context | None = None
        self.context = contextvars.Context()  # in which the rank's code runs
        self._patches = NO_PATCHES
        self.own: list[Own] = []  # added while the rank runs
        self.signal_handlers: dict[int, Any] = {}  # by the number of the signal
        self.leaves_streams = False  # where its text goes at the end of this run is everybody's
        self.begins_here = False  # the runs to come begin with the random numbers and the dtype at the end of this one
        self._is_here = False  # the process is this rank's now

    def enter(self) -> None:
        """The rank starts."""
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
        torch.set_num_threads(1)  # of this thread alone
        self._plain = _everybodys | self._environment
        self._set_environment()
        diverted.begin(self._kept)
        self._began = torchs_own.begin()
        self._python = python_stream()
        if observer is not None:
            observer.arrive(self._rank)
        if self._patches:
            put_patches(self._patches)
        for own in self.own:
            own.arrive()

    def _take_over(self) -> None:
        """What the controller has, or has changed since the last run of this rank."""
        settings, context = of_thread.of_controller()
        if self._first is not None and (self._given is None or settings.dtype is self._given.dtype):
            torch.set_default_dtype(self._first.dtype)
        elif torch.get_default_dtype() is not settings.dtype:
            torch.set_default_dtype(settings.dtype)
        if self._given is None or not settings.is_as(self._given):
            of_thread.put(settings, dtype=False)
        flags.put(self._flags if self._given is not None and settings.flags == self._given.flags else settings.flags)
        if self._base is None:
            self.context = of_thread.own_variables(context)
        else:
            self.context.run(of_thread.put_variables, context, self._base)
        self._given, self._base = settings, context

    def save(self) -> None:
        """The rank gives up its turn."""
        for own in reversed(self.own):
            own.leave()
        self._patches = take_patches()
        self._take_environment()
        self._is_here = False
        self._torch = torch.default_generator.get_state()
        self._devices.take()
        self._python = python_stream(self._python)
        self._normal = kept_normal()
        self._dtype = torch.get_default_dtype()
        self._diverted = diverted.present()
        self._flags = flags.present()
        self._torchs_own = torchs_own.present()
        torchs_own.put_back()

    def restore(self) -> None:
        """The rank has its turn again."""
        self._is_here = True
        torch.default_generator.set_state(self._torch)
        self._devices.put()
        set_python_stream(self._python)
        _set_numpy(self._numpy)
        set_kept_normal(self._normal)
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)
        self._set_environment()
        flags.put(self._flags)
        diverted.put_back(self._diverted)
        torchs_own.put_back(self._torchs_own)
        if observer is not None:
            observer.arrive(self._rank)
        if self._patches:
            put_patches(self._patches)
        for own in self.own:
            own.arrive()

    def leave(self) -> None:
        """The rank has ended."""
        for own in reversed(self.own):
            own.leave()
        self._patches = take_patches()
        self._take_environment()
        self._is_here = False
        self.left = of_thread.present()
        self._flags = self.left.flags
        self._devices.take()
        if self.begins_here:
            numpy, state = np.random.get_state(), torch.default_generator.get_state()
            self._first = _First(state, self._devices, python_stream(), numpy, torch.get_default_dtype())
        self._kept = diverted.end(leaves=self.leaves_streams)
        torchs_own.end(self._began)

    def take_back(self) -> None:
        """In the controller: what the rank has changed is nobody's, if it was given up in its turn."""
        if self._is_here:
            self._is_here = False
            for undo in (*(own.leave for own in reversed(self.own)), take_patches, self._take_environment):
                with suppress(Exception):  # it may have been given up while it did that itself
                    undo()

    def give_to_controller(self) -> None:
        """In the controller, after a run: what this rank has changed for its thread is everybody's from here on."""
        assert self._given is not None
        assert self._base is not None
        _change(self._changed)
        self._changed = {}
        put_patches(self._patches)
        self._patches = NO_PATCHES
        if not self.left.is_as(self._given):
            of_thread.put(self.left)
        of_thread.put_variables(self.context, self._base)

    def _set_environment(self) -> None:
        for name, value in self._environment.items():
            if _variables.get(name) != value:  # half of them are the same on all ranks, and to set one takes long
                _environment[name] = value
        if self._changed:
            _change(self._changed)

    def _take_environment(self) -> None:
        """What the rank's code has changed is its own; the launcher's variables are set for each turn."""
        if _variables == self._plain:
            if self._changed:
                self._changed = {}
            return
        plain = self._plain
        self._changed = {name: value for name, value in _variables.items() if plain.get(name) != value}
        self._changed |= dict.fromkeys(plain.keys() - _variables.keys())
        _change({name: plain.get(name) for name in self._changed})


def _change(changes: dict[Any, Any]) -> None:
    """Of the environment; None takes a variable out."""
    for name, value in changes.items():
        if value is not None:
            _environment[name] = value
        elif name in _variables:
            del _environment[name]


@contextmanager
def isolated_controller() -> Iterator[None]:
    """Give the controller back what the ranks change."""
    torch_state, python_state = torch.default_generator.get_state(), python_stream()
    numpy_generator, normal, threads = _get_numpy(), kept_normal(), torch.get_num_threads()
    dtype, set_flags, hook = torch.get_default_dtype(), flags.present(), sys.excepthook
    of_thread.remember_controllers()
    environment = {name: os.environ.get(name) for name in (*_RANK_VARIABLES, *_OF_ALL)}
    os.environ.update((name, value) for name, value in _OF_ALL.items() if environment[name] != value)
    _everybodys.clear()
    _everybodys.update(_variables)
    take_controllers()
    try:
        with diverted.controllers(), torchs_own.controllers(), device_streams.of_controller():
            yield
    finally:
        if observer is not None:
            observer.arrive(-1)
        torch.default_generator.set_state(torch_state)
        set_python_stream(python_state)
        _set_numpy(numpy_generator)
        set_kept_normal(normal)
        torch.set_default_dtype(dtype)
        flags.put(set_flags)
        torch.set_num_threads(threads)  # what a rank has set is the default of threads to come
        sys.excepthook = hook  # init_process_group puts its own in front, once for each rank
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
