"""The output of pytest in a process that may not report, held until that is decided. Does not import torch."""

from __future__ import annotations

import io
from typing import Any

import pytest

from pdlcheck.compat.pytest.terminal import exchange_file, file_of

__all__ = ["drop", "hold", "show"]

_held: pytest.StashKey[tuple[Any, Any]] = pytest.StashKey()  # the terminal's writer, and the file that it writes to


def hold(config: pytest.Config) -> None:
    """Keep the text from now on until it is shown or dropped; the end of the session shows it."""
    if config.pluginmanager.hasplugin("terminalreporter"):
        writer: Any = config.get_terminal_writer()
        config.stash[_held] = writer, file_of(writer)
        exchange_file(writer, io.StringIO())
        config.add_cleanup(lambda: show(config))


def show(config: pytest.Config) -> None:
    """Print the kept text; from now on, all text is printed at once."""
    if (held := config.stash.get(_held, None)) is not None:
        writer, file = held
        file.write(file_of(writer).getvalue())
        file.flush()
        exchange_file(writer, file)
        del config.stash[_held]


def drop(config: pytest.Config) -> None:
    """Discard the kept text and all later text."""
    if (held := config.stash.get(_held, None)) is not None:
        exchange_file(held[0], io.StringIO())
        del config.stash[_held]
