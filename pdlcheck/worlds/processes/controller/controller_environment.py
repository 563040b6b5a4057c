"""The surroundings of the controller's code: import path, command arguments, current directory, environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from os import getcwd
from typing import Any

from pdlcheck.compat.python.environment import encoded_environment
from pdlcheck.worlds.processes.exchange.messages import Changes

__all__ = ["ControllerEnvironment", "import_path"]


@dataclass(frozen=True, slots=True)
class ControllerEnvironment:
    """The controller's surroundings at one moment; a pool keeps those that its ranks have adopted last."""

    path: tuple[str, ...]
    arguments: tuple[str, ...]
    directory: str | None
    environment: Mapping[str, str]

    def changes(self) -> tuple[Changes, ControllerEnvironment]:
        """Compare with the present surroundings; return the changes, and the present surroundings."""
        now = _here()
        same = now.environment is self.environment
        changes = Changes(
            path=now.path if now.path != self.path else None,
            arguments=now.arguments if now.arguments != self.arguments else None,
            directory=now.directory if now.directory != self.directory else None,
            set={} if same else dict(now.environment.items() - self.environment.items()),
            unset=() if same else tuple(name for name in self.environment if name not in now.environment),
        )
        return changes, now


def _here() -> ControllerEnvironment:
    try:
        directory = getcwd()
    except FileNotFoundError:  # the directory was deleted; the ranks stay where they are
        directory = None
    return ControllerEnvironment(import_path(), tuple(map(str, sys.argv)), directory, _environment())


def _environment() -> Mapping[str, str]:
    """Return the environment. It is the same object while nothing changes, because decoding all of it takes time."""
    global _decoded
    encoded = encoded_environment()  # os.environ decodes these at every access
    if encoded is None:
        return dict(os.environ)
    known, decoded = _decoded
    if encoded != known:
        environ: Any = os.environ
        decode_name, decode_value = environ.decodekey, environ.decodevalue
        decoded = dict(decoded)
        for name in known.keys() - encoded.keys():
            del decoded[decode_name(name)]
        for name, value in encoded.items() - known.items():
            decoded[decode_name(name)] = decode_value(value)
        _decoded = dict(encoded), decoded
    return decoded


_decoded: tuple[dict[Any, Any], Mapping[str, str]] = {}, {}


def import_path() -> tuple[str, ...]:
    """Return ``sys.path`` in a form that is valid in every directory. Path hooks own the entries that name no file."""
    return tuple(
        entry if _is_whole(entry) or not os.path.exists(entry or ".") else os.path.abspath(entry) for entry in sys.path
    )


@lru_cache(maxsize=1024)
def _is_whole(entry: str) -> bool:
    """Return whether this path is its own absolute path, so that the file system need not be asked."""
    return os.path.isabs(entry) and os.path.abspath(entry) == entry
