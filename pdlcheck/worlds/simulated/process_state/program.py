"""The program of each simulated rank: ``__main__``, modules that are not installed, arguments, search path, folder.

A process imports the modules of its program itself, so they may hold its rank, its groups and its model. Here, each
rank imports them anew. The modules of the standard library and of installed packages are imported once and shared.
"""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

import pdlcheck
from pdlcheck.compat.python.imports import module_locks

__all__ = ["OwnProgram", "program_modules"]

_MAIN = ("__main__", "__mp_main__")


class OwnProgram:
    """The program of one rank; an ``Own`` of ``scheduling/rank_state.py``."""

    def __init__(self) -> None:
        self._controllers = program_modules()  # in force while no rank runs
        self._start = sys.argv, sys.path, _folder()
        self._argv, self._path, self._folder = list(sys.argv), list(sys.path), self._start[2]
        for name in self._controllers.keys() - {"__main__"}:
            del sys.modules[name]
        self._known = set(sys.modules)  # names that are looked at: they stay shared, unless they are in _names
        self._names = set(_MAIN)
        self._modules: dict[str, Any] = {}
        self._locks: dict[str, Any] = {}
        sys.argv, sys.path = self._argv, self._path

    def leave(self) -> None:
        """Take the rank's program away, and put the controller's back."""
        modules, locks = sys.modules, module_locks()
        for name in modules.keys() - self._known:
            self._known.add(name)
            if _belongs(modules[name]):
                self._names.add(name)
        self._modules = {name: modules.pop(name) for name in self._names if name in modules}
        self._locks = {name: locks.pop(name) for name in list(locks) if name in self._names}
        modules.update(self._controllers)
        self._argv, self._path, self._folder = sys.argv, sys.path, _folder()
        sys.argv, sys.path, folder = self._start
        _change_folder(self._folder, folder)

    def arrive(self) -> None:
        """Put the rank's program in force."""
        for name in self._controllers:
            sys.modules.pop(name, None)
        sys.modules.update(self._modules)
        if self._locks:
            module_locks().update(self._locks)
        sys.argv, sys.path = self._argv, self._path
        _change_folder(self._start[2], self._folder)


def program_modules() -> dict[str, Any]:
    """Return the imported modules that belong to the program: ``__main__``, and all that are not installed."""
    return {name: module for name, module in list(sys.modules.items()) if name in _MAIN or _belongs(module)}


def _belongs(module: Any) -> bool:
    """Return whether a module is the program's, and Python can import it again."""
    if not isinstance(module, ModuleType):
        return False
    file = getattr(module, "__file__", None)
    places = [file] if isinstance(file, str) else [*getattr(module, "__path__", ())]
    return bool(places) and not any(_is_shared(place) for place in places)


def _is_shared(place: str) -> bool:
    return os.path.realpath(place).startswith(_installed()) or place.endswith((".so", ".pyd"))


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the folders of modules that ranks share."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    paths += [place for package in (torch, pdlcheck) for place in package.__path__]  # also where they are not installed
    return tuple({os.path.realpath(path) + os.sep for path in paths})


def _folder() -> str:
    with suppress(OSError):
        return os.getcwd()
    return ""


def _change_folder(before: str, now: str) -> None:
    if now and now != before:
        with suppress(OSError):
            os.chdir(now)
