"""A folder with a user's script, and the command that runs it."""

from __future__ import annotations

import os
import textwrap

import pytest

from pdlcheck.cli import main


class Scripts:
    """The scripts of one test, in its folder."""

    def __init__(self, folder, capfd):
        self.folder = folder
        self._capfd = capfd

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def run(self, *words):
        """Run ``pdlcheck run``; return its exit code, what the ranks printed, and its verdict."""
        self._capfd.readouterr()
        code = main(["run", *map(str, words)])
        out, err = self._capfd.readouterr()
        return code, out, err


@pytest.fixture
def scripts(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = _environment()
    yield Scripts(tmp_path, capfd)
    assert _environment() == before


def _environment():
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
