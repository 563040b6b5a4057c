"""What the controller's code sees around it: import path, current directory, environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pdlcheck.worlds.processes.messages import Changes

__all__ = ["Surroundings", "import_path"]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The controller's at one moment; those that ranks were told of last."""

    path: tuple[str, ...]
    directory: str | None
    environment: Mapping[str, str]

    def changes(self) -> tuple[Changes, Surroundings]:
        """Compare with the present; return what changed, and the present."""
        now = _here()
        names = [name for name in self.environment if name not in now.environment]
        changes = Changes(
            path=now.path if now.path != self.path else None,
            directory=now.directory if now.directory != self.directory else None,
            set=dict(now.environment.items() - self.environment.items()),
            unset=tuple(names),
        )
        return changes, now


def _here() -> Surroundings:
    try:
        directory = os.getcwd()
    except FileNotFoundError:  # it was deleted; the ranks stay where they are
        directory = None
    return Surroundings(import_path(), directory, dict(os.environ))


def import_path() -> tuple[str, ...]:
    """``sys.path`` as it means the same in another directory; entries that name no file belong to path hooks."""
    return tuple(os.path.abspath(entry) if os.path.exists(entry or ".") else entry for entry in sys.path)
