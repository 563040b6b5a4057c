"""The debugger in the rank of ``--rank-pdb``, which reads and writes through the controller's terminal."""

from __future__ import annotations

import io
import pdb
import sys
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any

import torch.distributed as dist

from pdlcheck.errors import PeerFailed

__all__ = ["Terminal", "post_mortem", "serve", "take_breakpoints"]


@dataclass(frozen=True)
class Terminal:
    """The address at which the controller listens, and the rank that it debugs."""

    address: str
    authkey: bytes
    rank: int


_terminal: Terminal | None = None


def serve(terminal: Terminal | None) -> None:
    """Store the terminal when a rank starts, and take over breakpoints."""
    global _terminal
    _terminal = terminal
    take_breakpoints()


def take_breakpoints() -> None:
    """Replace ``breakpoint()`` and ``pdb.set_trace()`` with the versions of this module."""
    sys.breakpointhook = _breakpoint
    pdb.set_trace = _breakpoint


def post_mortem(nodeid: str, error: BaseException, report: str) -> None:
    """Open the debugger at a failure, before it is reported and the other ranks stop."""
    if _terminal is None or dist.get_rank() != _terminal.rank or isinstance(error, PeerFailed):
        return
    line = _Line(_terminal)
    line.write(f"\n{report}\n\n>>> rank {_terminal.rank} after the failure of {nodeid}\n")
    debugger = _RankPdb(line)
    debugger.reset()
    debugger.interaction(None, error.__traceback__)
    line.release()


def _breakpoint(*args: Any, **kwargs: Any) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if _terminal is None:
        raise RuntimeError(f"breakpoint() in rank {rank}, which has no terminal; give it one: pytest --rank-pdb {rank}")
    if rank == _terminal.rank:
        frame = sys._getframe().f_back
        line = _Line(_terminal)
        line.write(f"\n>>> rank {rank} at a breakpoint\n")
        _RankPdb(line).set_trace(frame)


class _Line(io.TextIOBase):
    """A file object for ``pdb`` that is connected to the terminal while it is in use."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._connection: Connection[Any, Any] | None = None

    def write(self, text: str) -> int:
        self._connected().send(("say", text))
        return len(text)

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        connection = self._connected()
        connection.send(("ask", ""))
        return str(connection.recv())

    def release(self, word: str = "end") -> None:
        """Release the terminal; return when pytest captures again."""
        if self._connection is not None:
            self._connection.send((word, ""))
            self._connection.recv()
            self._connection.close()
            self._connection = None

    def _connected(self) -> Connection[Any, Any]:
        if self._connection is None:
            self._connection = Client(self.terminal.address, authkey=self.terminal.authkey)
        return self._connection


class _RankPdb(pdb.Pdb):
    def __init__(self, line: _Line) -> None:
        super().__init__(stdin=line, stdout=line, nosigint=True)  # type: ignore[arg-type]
        self._line = line
        self.prompt = f"(Pdb rank {line.terminal.rank}) "

    def do_continue(self, arg: str) -> bool | None:
        stop = super().do_continue(arg)
        self._line.release()
        return stop

    do_c = do_cont = do_continue

    def do_quit(self, arg: str) -> bool | None:
        stop = super().do_quit(arg)
        self._line.release("quit")
        return stop

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool | None:  # noqa: N802 - pdb calls it by this name
        return self.do_quit(arg)
