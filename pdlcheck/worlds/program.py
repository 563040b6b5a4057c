"""The program of a rank: a script with modules, arguments and a working directory of its own, as a process has them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["import_known_globals", "own_program", "program_modules"]


@contextmanager
def own_program() -> Iterator[None]:
    """Give the calling rank a program of its own while the block runs: ``__main__``, its modules and ``sys.argv``.

    A process has these anyway, so this concerns simulated ranks only. Installed packages stay shared.
    """
    scheduler = sys.modules.get("pdlcheck.worlds.simulated.scheduling.scheduler")
    if scheduler is None or scheduler.current_rank() is None:
        yield
        return
    from pdlcheck.worlds.simulated.process_state.program import OwnProgram

    own = scheduler.running_rank().state.own
    program = OwnProgram()
    own.append(program)
    try:
        yield
    finally:
        own.remove(program)
        program.leave()


def program_modules() -> dict[str, Any]:
    """Return the imported modules of the program of this process: ``__main__``, and all that are not installed."""
    from pdlcheck.worlds.simulated.process_state.program import program_modules as found

    return found()


def import_known_globals(packages: Collection[str]) -> None:
    """Import the modules of these installed packages that keep the rank of a process: simulated ranks then have each.

    A module that cannot be imported is left to the program.
    """
    from pdlcheck.worlds.simulated.module_globals.modules import KNOWN

    for name in KNOWN:
        if name.partition(".")[0] in packages:
            with suppress(Exception):
                importlib.import_module(name)
