"""The terminal reporter in a rank: it has the options and answers plugins that use it, but shows nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdlcheck.compat.pytest.terminal import TerminalReporter

__all__ = ["silent_reporter"]

_NAME = "terminalreporter"


@contextmanager
def silent_reporter(config: pytest.Config) -> Iterator[None]:
    """Block the reporter while plugins are configured, and register a silent one afterwards.

    The block keeps plugins from creating a reporter that writes.
    """
    plugins = config.pluginmanager
    if not plugins.hasplugin("terminal"):
        yield
        return
    plugins.set_blocked(_NAME)
    yield
    plugins.unblock(_NAME)
    plugins.register(_Silent(config), _NAME)


class _Silent:
    """A stand-in for the reporter, which creates the reporter when one of its attributes is read.

    It has no hooks, because they would take time at each test.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._made: TerminalReporter | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("pytest_"):
            raise AttributeError(name)
        if self._made is None:
            self._made = TerminalReporter(self._config, open(os.devnull, "w"))  # noqa: SIM115 - never closed in a rank
        return getattr(self._made, name)
