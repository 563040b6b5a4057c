"""The environment of each simulated rank: the launcher's variables, and the changes of the rank's code."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from pdlcheck.compat.python.environment import encoded_environment
from pdlcheck.launch.nesting import INSIDE
from pdlcheck.worlds.simulated.process_state.protocol import ProcessState, Rank

__all__ = ["Environment"]

_environment: Any = os.environb if os.supports_bytes_environ else os.environ  # os.environ takes twice as long
_encoded = encoded_environment()
_variables: Any = _environment if _encoded is None else _encoded  # the same, as a plain dict if Python has one
_encode: Callable[[str], Any] = str if _environment is os.environ else os.fsencode
_OF_EACH = tuple(map(_encode, ("RANK", "LOCAL_RANK")))
_OF_WORLD = tuple(map(_encode, ("WORLD_SIZE", "LOCAL_WORLD_SIZE")))
_OF_ALL = {  # no process listens at that address
    _encode(name): _encode(value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", INSIDE: "1"}.items()
}


@functools.cache
def _launchers(rank: int, world_size: int) -> dict[Any, Any]:
    """Return the variables that a launcher sets for a rank."""
    own, common = _encode(str(rank)), _encode(str(world_size))
    return dict.fromkeys(_OF_EACH, own) | dict.fromkeys(_OF_WORLD, common)


def _set(name: Any, value: Any) -> None:
    if _encoded is None:
        _environment[name] = value
    else:  # what os.environ does, without its checks
        os.putenv(name, value)
        _encoded[name] = value


class _Variables:
    """The variables of one rank.

    Args:
        launchers: the variables that a launcher sets for the rank.
        plain: all variables that the rank starts with.
        changed: the variables that the rank's code has changed since; None: removed.
    """

    __slots__ = ("changed", "launchers", "plain")

    def __init__(self, launchers: dict[Any, Any], plain: dict[Any, Any], changed: dict[Any, Any]) -> None:
        self.launchers, self.plain, self.changed = launchers, plain, changed


class Environment(ProcessState):
    """The environment. A rank keeps the changes that its code makes, also for later runs.

    A rank that gives up its turn takes its changes back. The launcher's variables are set for each turn.
    """

    start: dict[Any, Any]
    _here: _Variables  # those of the rank that runs

    def capture(self) -> _Variables:
        """Return the variables of the rank, and undo the changes that its code has made."""
        here = self._here
        plain = here.plain
        if _variables == plain:
            if here.changed:
                here.changed = {}
            return here
        here.changed = {name: value for name, value in _variables.items() if plain.get(name) != value}
        here.changed |= dict.fromkeys(plain.keys() - _variables.keys())
        _change({name: plain.get(name) for name in here.changed})
        return here

    def apply(self, state: _Variables) -> None:
        """Set the launcher's variables that differ between ranks, and repeat the changes that its code has made."""
        self._here = state
        launchers = state.launchers
        for name in _OF_EACH:
            _set(name, launchers[name])
        if state.changed:
            _change(state.changed)

    def baseline(self) -> Callable[[], object] | None:
        """Set the variables that are equal on all ranks, and return the function that restores the controller's."""
        before = {name: _variables.get(name) for name in (*_OF_EACH, *_OF_WORLD, *_OF_ALL)}
        for name, value in _OF_ALL.items():
            if before[name] != value:
                _set(name, value)
        self.start = dict(_variables)
        return functools.partial(_change, before)

    def begin(self, rank: Rank, kept: _Variables | None) -> _Variables:
        """Set the rank's variables. The changes of its earlier runs are among them."""
        launchers = _launchers(rank.rank, rank.world_size)
        for name in _OF_WORLD:
            if _variables.get(name) != launchers[name]:
                _set(name, launchers[name])
        self.apply(_Variables(launchers, self.start | launchers, {} if kept is None else kept.changed))
        return self._here

    def end(self, rank: Rank, kept: Any) -> _Variables:
        """Return the variables of the rank, and undo the changes that its code has made."""
        return self.capture()

    def give(self, rank: Rank, kept: _Variables) -> _Variables:
        """Make the rank's changes the controller's."""
        _change(kept.changed)
        return _Variables(kept.launchers, kept.plain, {})

    def take_back(self) -> None:
        """Undo the changes of a rank that was given up."""
        self.capture()


def _change(changes: Mapping[Any, Any]) -> None:
    """Apply changes to the environment. None removes a variable."""
    for name, value in changes.items():
        if value is not None:
            _set(name, value)
        elif name in _variables:
            del _environment[name]
