"""What the controller's code sees around it: import path, arguments of the command, current directory, environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from os import getcwd
from typing import Any

from pdlcheck.worlds.processes.exchange.messages import Changes

__all__ = ["Surroundings", "import_path"]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The controller's at one moment; those that ranks were told of last."""

    path: tuple[str, ...]
    arguments: tuple[str, ...]
    directory: str | None
    environment: Mapping[str, str]

    def changes(self) -> tuple[Changes, Surroundings]:
        """Compare with the present; return what changed, and the present."""
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


def _here() -> Surroundings:
    try:
        directory = getcwd()
    except FileNotFoundError:  # it was deleted; the ranks stay where they are
        directory = None
    return Surroundings(import_path(), tuple(map(str, sys.argv)), directory, _environment())


def _environment() -> Mapping[str, str]:
    """The environment; the same object for as long as nothing changes. Decoding all of it takes a while."""
    global _decoded
    encoded = getattr(os.environ, "_data", None)  # what os.environ decodes at every access
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
    """``sys.path`` as it means the same in another directory; entries that name no file belong to path hooks."""
    return tuple(
        entry if _is_whole(entry) or not os.path.exists(entry or ".") else os.path.abspath(entry) for entry in sys.path
    )


@lru_cache(maxsize=1024)
def _is_whole(entry: str) -> bool:
    """The file system need not be asked: this path is its own absolute path."""
    return os.path.isabs(entry) and os.path.abspath(entry) == entry
