"""The controller's side of ``--rank-pdb``, which lends the terminal to the debugger of one rank."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any

import pytest

from pdlcheck.item_runners.processes.rank.debugger import Terminal

__all__ = ["lend", "take_back", "tell_where_the_ranks_are"]

_lent: pytest.StashKey[_Lender] = pytest.StashKey()


def lend(config: pytest.Config, rank: int) -> Terminal:
    """Listen for the debugger of a rank; may be called more than once."""
    if _lent not in config.stash:
        config.stash[_lent] = _Lender(config, rank)
    return config.stash[_lent].terminal


def take_back(config: pytest.Config) -> None:
    """Stop listening."""
    if _lent in config.stash:
        config.stash[_lent].close()


class _Lender:
    """A thread that serves one debugger after another."""

    def __init__(self, config: pytest.Config, rank: int) -> None:
        self._config = config
        authkey = os.urandom(32)
        # On Linux the socket has a name without a file, so that no file is left if this process is killed.
        address = f"\0pdlcheck-{os.getpid()}-{os.urandom(8).hex()}" if sys.platform == "linux" else None
        self._listener = Listener(address, family="AF_UNIX", authkey=authkey)
        self._closed = False
        self.terminal = Terminal(address or str(self._listener.address), authkey, rank)
        threading.Thread(target=self._serve, name="pdlcheck terminal", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed:
            with (
                contextlib.suppress(OSError, EOFError, AuthenticationError),
                self._listener.accept() as connection,
                self._uncaptured(),
            ):
                self._talk(connection)

    def _talk(self, connection: Connection[Any, Any]) -> None:
        rest = ""
        while True:
            word, text = connection.recv()  # raises EOFError if the rank has died
            if word == "say":
                *lines, rest = (rest + text).split("\n")
                sys.stdout.write("".join(f"{line}\n" for line in lines))
                sys.stdout.flush()
            elif word == "ask":
                connection.send(_ask(rest))
                rest = ""
            else:
                if word == "quit":
                    session: Any = self._config.pluginmanager.getplugin("session")
                    session.shouldstop = f"the debugger of rank {self.terminal.rank} was left by quit"
                break
        self._resume.close()
        connection.send("")

    @contextlib.contextmanager
    def _uncaptured(self) -> Iterator[None]:
        capture = self._config.pluginmanager.getplugin("capturemanager")
        with contextlib.ExitStack() as self._resume:
            if capture is not None:
                capture.suspend(in_=True)
                self._resume.callback(capture.resume)
            yield


def _ask(prompt: str) -> str:
    try:
        return input(prompt) + "\n"  # ``input`` has line editing
    except EOFError:
        return ""


def tell_where_the_ranks_are(node: pytest.Item, call: pytest.CallInfo[Any]) -> None:
    """Print how to debug a rank, before ``--pdb`` shows the controller's frames.

    The frames of a rank process are in that process and no longer exist.
    """
    assert call.excinfo is not None
    told = re.search(r"^ranks? (\d+)", "\n".join(getattr(call.excinfo.value, "__notes__", [])), re.MULTILINE)
    rank = told[1] if told else 0
    words = f"--pdb is the controller's, without the frames of the ranks: --rank-pdb {rank} has them"
    node.config.get_terminal_writer().line(f"\n{words}")
