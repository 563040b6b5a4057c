"""Holds back what pytest prints in a process of which nobody knows yet whether it reports. Does not import torch."""

from __future__ import annotations

import io
from typing import Any

import pytest

__all__ = ["drop", "hold", "show"]

_held: pytest.StashKey[tuple[Any, Any]] = pytest.StashKey()  # the terminal's writer, and the file that it writes to


def hold(config: pytest.Config) -> None:
    """Keep the text from now on, until it is shown or dropped; at the end of the session it is shown."""
    if config.pluginmanager.hasplugin("terminalreporter"):
        writer: Any = config.get_terminal_writer()
        config.stash[_held] = writer, writer._file
        writer._file = io.StringIO()
        config.add_cleanup(lambda: show(config))


def show(config: pytest.Config) -> None:
    """Print the text that was kept; from now on all text is printed at once."""
    if (held := config.stash.get(_held, None)) is not None:
        writer, file = held
        file.write(writer._file.getvalue())
        file.flush()
        writer._file = file
        del config.stash[_held]


def drop(config: pytest.Config) -> None:
    """Forget the text that was kept, and all that follows."""
    if (held := config.stash.get(_held, None)) is not None:
        held[0]._file = io.StringIO()
        del config.stash[_held]
