"""Random numbers that modules of ``own_globals`` draw at import, drawn again for each simulated rank.

A process draws them when it imports the module. Simulated ranks share the controller's import. So the module's code is
run again for each rank, from the streams of this rank. Two runs differ only in what they have drawn, or what they have
computed from it, from the time, and the like. These values, and no others, are put into the rank's globals.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pdlcheck.worlds.advice import advise
from pdlcheck.worlds.import_streams import CONTROLLER, ImportStreams, drawn_by, first_imports, streams_kept
from pdlcheck.worlds.simulated.module_globals.mutable_state import (
    Contents,
    MutableState,
    find_holders,
    identical,
    leaf_value,
    own_leaves,
    user_modules,
)

__all__ = ["OwnDraws", "modules_that_draw"]

_STREAMS = ("numpy.random", "random", "torch")
_PLAIN = (bool, bytes, complex, float, int, str)
_OF_MODULES = ("__file__", "__loader__", "__package__", "__path__", "__spec__")
_Key = tuple[str, str, int]  # the path of a holder, its kind, and its number among those of the same path and kind


def modules_that_draw(names: Sequence[str], file: str | None = None) -> dict[str, tuple[ModuleType, tuple[str, ...]]]:
    """Return the user's modules that may have drawn numbers, unseeded, when they were imported, with the streams.

    Args:
        names: modules and packages; only these are returned.
        file: a test file; only this file, and modules that it was the first to import, are returned.
    """
    below = tuple(f"{name}." for name in names)
    found = {}
    for name, module in user_modules().items():
        if name in names or name.startswith(below):
            own = str(module.__file__)
            for by in [own, *first_imports(name)] if file is None else [file]:
                if (streams := drawn_by(by)) and (by == own or by in first_imports(name)):
                    found[name] = module, streams
    return found


class OwnDraws:
    """The values that the modules draw at import, for any rank.

    Args:
        modules: the modules, with the streams from which they may draw.
    """

    def __init__(self, modules: Mapping[str, tuple[ModuleType, tuple[str, ...]]]) -> None:
        self.modules = modules
        self._runs: dict[tuple[int, int, str], ModuleType] = {}
        self._failed: set[str] = set()

    def put_into(
        self, contents: Contents, holders: Sequence[MutableState], rank: int, seed: int, classes: Container[str]
    ) -> None:
        """Replace in the contents of the holders, in place, what the modules draw by what the rank draws.

        Args:
            contents: the contents of each holder.
            holders: what is found in the modules.
            rank: the rank.
            seed: the seed of its streams.
            classes: names of the modules whose classes have instances that are examined.
        """
        base, own = self._holders(CONTROLLER, seed, classes), self._holders(rank, seed, classes)
        there = [
            (of, base[key].read(), own[key].read())
            for key, of in zip(_keys(holders), contents, strict=True)
            if key in base and key in own
        ]
        copies = own_leaves([ours for *_, ours in there])
        for (of, before, _), ours in zip(there, copies, strict=True):
            for name in of.keys() & before.keys() & ours.keys():
                drawn = _items if name == "" else _drawn
                of[name] = drawn(of[name], before[name], ours[name])

    def _holders(self, process: int, seed: int, classes: Container[str]) -> dict[_Key, MutableState]:
        """Return what is found in the modules after a run of their code that draws from the streams of a process."""
        found: list[MutableState] = []
        for name, (module, streams) in self.modules.items():
            key = process, seed, name
            if key not in self._runs and name not in self._failed:
                try:
                    self._runs[key] = _executed(module, process, seed, streams)
                except Exception as error:
                    self._failed.add(name)
                    advise(
                        f"simulated ranks share what {name} draws at import, because its code fails when it runs again "
                        f"for each rank: {type(error).__name__}: {error}"
                    )
            if name not in self._failed:
                found += find_holders({name: self._runs[key]}, {name: self._runs[key]}, {}, classes=classes)
        return dict(zip(_keys(found), found, strict=True))


def _executed(module: ModuleType, process: int, seed: int, streams: Sequence[str]) -> ModuleType:
    """Return a new module with the code of this one, which draws from the streams of a process."""
    file = str(module.__file__)
    again = ModuleType(module.__name__)
    vars(again).update({name: value for name, value in vars(module).items() if name in _OF_MODULES})
    own = ImportStreams(process, seed, [one for one in _STREAMS if one not in streams])
    code = compile(Path(file).read_bytes(), file, "exec")
    with warnings.catch_warnings(), streams_kept(), own.of(file, noted=False):
        warnings.simplefilter("ignore")  # the import has issued them
        exec(code, vars(again))  # the user's own module
    return again


def _keys(holders: Sequence[MutableState]) -> list[_Key]:
    """Return a name for each holder by which it is found again after another run."""
    numbers: dict[tuple[str, str], int] = {}
    keys = []
    for holder in holders:
        where = holder.path(""), holder.kind
        numbers[where] = numbers.get(where, -1) + 1
        keys.append((*where, numbers[where]))
    return keys


def _items(value: Any, before: Any, ours: Any) -> Any:
    """Return the contents of a container; those of a dict are pairs."""
    if not len(value) == len(before) == len(ours):
        return value
    return tuple(_pair(*three) for three in zip(value, before, ours, strict=True))


def _pair(value: Any, before: Any, ours: Any) -> Any:
    if type(value) is tuple and len(value) == len(before) == len(ours) == 2 and identical(value[0], before[0]):
        return value[0], _drawn(value[1], before[1], ours[1])
    return _drawn(value, before, ours)


def _drawn(value: Any, before: Any, ours: Any) -> Any:
    """Return ``ours`` if it is another number, or other numbers, than ``before``; otherwise return ``value``."""
    if not type(value) is type(before) is type(ours):
        return value
    if type(value) is tuple:
        parts = _items(value, before, ours)
        return value if all(part is old for part, old in zip(parts, value, strict=True)) else parts
    if type(value) in _PLAIN:
        return value if identical(before, ours) else ours
    return value if leaf_value(before) == leaf_value(ours) else ours
