"""The controller's side of the fork server: one server in each process, started by ``start`` or when first needed.

The server may have a twin with another hash seed; see ``hash_seeds.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdlcheck.compat.torch.slow_imports import SLOW_IMPORTS
from pdlcheck.errors import WorldUnavailable
from pdlcheck.time_budgets import SERVER_ANSWER_S, SERVER_LOOK_S, SERVER_STOP_S
from pdlcheck.worlds.processes.controller import hash_seeds
from pdlcheck.worlds.processes.controller.controller_environment import import_path
from pdlcheck.worlds.processes.controller.exits import FORKER, how_it_ended
from pdlcheck.worlds.processes.controller.process_state import ended_as, is_stopped
from pdlcheck.worlds.processes.rank.orphans import SERVER, end_marked
from pdlcheck.worlds.processes.rank.server import FORK, HEADER, IMPORT, RANK, SIGNAL, STATUS

__all__ = ["Child", "ForkServer", "Forker", "release", "retain", "start", "stop"]

_PRELOAD = (
    "torch",
    "torch.distributed",
    "numpy",
    "cloudpickle",
    "pdlcheck.worlds.processes.rank.main",
    *SLOW_IMPORTS,
)
_BOOT = (
    # Nothing is imported before the path is set: `python -c` starts with the working directory on it.
    "import sys; sys.path[:] = eval(sys.argv[1]); import os; sys.argv[4] and os.environ.pop(sys.argv[4]); "
    "from pdlcheck.worlds.processes.rank.server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


def start(*, preload: Sequence[str] = (), seed: int = 0, rank: int | None = None) -> None:
    """Start the fork server in the background and keep it until :func:`stop` or the end of this process.

    Call it early, before tests are collected: the server imports torch while this process does something else.

    Args:
        preload: modules that every rank should find imported, such as those that tests use.
        seed: the hash seeds of ranks are derived from it, unless the server runs already.
        rank: the rank of a launched process, whose server forks only this rank.
    """
    global _hashes_by, _kept
    with _lock:
        _hashes_by = seed, rank
        _server().preload(preload)
        _kept = True


def stop() -> None:
    """End the fork server, and with it every rank."""
    global _kept, _running
    with _lock:
        _kept = False
        if _running is not None:
            _running.stop()
            _running = None


def retain(user: object) -> ForkServer:
    """Return the running server, or a new one, for ``user`` to use until it calls :func:`release`."""
    with _lock:
        _users.add(id(user))
        return _server()


def release(user: object) -> None:
    """Record that ``user`` needs no server any more; end it after its last user, unless :func:`start` was called."""
    with _lock:
        _users.discard(id(user))
        idle = not _users and not _kept
    if idle:
        stop()


@dataclass(slots=True)
class Child:
    """A forked process; ``forker`` writes the pid and the exit code of the process into the pipe ``status``."""

    status: int
    forker: Forker
    pid: int = 0
    exitcode: int | None = field(default=None)
    went_with: str = ""  # see `RankProcess`

    def started(self) -> int:
        """Wait until the process exists; return its pid."""
        if not self.pid:
            self.pid = self._read("the fork server ended before it could start a rank")
            if self.pid < 0:
                raise WorldUnavailable(
                    f"the fork server could not start a rank: {os.strerror(-self.pid)}; "
                    "use fewer ranks, or raise the limit on processes (ulimit -u)",
                    cure="ulimit -u",
                )
        return self.pid

    def has_started(self) -> bool:
        """Return whether the process exists by now; the server may have to import modules before it forks."""
        return self.pid > 0 or (bool(select.select([self.status], [], [], 0)[0]) and self.started() > 0)

    def ended(self, timeout_s: float) -> bool:
        """Wait for the end of a process that has started; return whether it has ended.

        ``exitcode`` is then its code, or minus the signal that ended it.
        """
        if self.exitcode is None and select.select([self.status], [], [], timeout_s)[0]:
            data = os.read(self.status, STATUS.size)
            self.forker.ended = not data
            self.went_with = "" if data else self.forker.last_words()
            self.exitcode = STATUS.unpack(data)[0] if data else -signal.SIGKILL
        if self.exitcode is None and self.pid > 0:  # its forker may be stopped and report nothing
            self.exitcode = ended_as(self.pid)
        return self.exitcode is not None

    def _read(self, trouble: str) -> int:
        until = time.monotonic() + SERVER_ANSWER_S
        while not select.select([self.status], [], [], SERVER_LOOK_S)[0]:
            stopped = is_stopped(self.forker.pid)
            if stopped or time.monotonic() > until:
                self.forker.ended = True  # no longer usable
                why = "a signal (SIGSTOP) has stopped it" if stopped else f"not within {SERVER_ANSWER_S:g} s"
                raise WorldUnavailable(
                    f"the fork server, process {self.forker.pid}, does not answer: {why}; the next test gets a new one",
                    cure=f"kill -CONT {self.forker.pid}",
                )
        data = os.read(self.status, STATUS.size)
        if not data:
            raise WorldUnavailable(
                f"{trouble}; `python -c 'import pdlcheck.worlds.processes.rank.main'` shows why",
                cure="pip install pdlcheck",
            )
        number: int = STATUS.unpack(data)[0]
        return number


class Forker:
    """The process ``pid``, which forks others; ``server.py`` describes its requests."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self._socket = control
        self.pid = pid
        # Reentrant: garbage collection during a send may close a world, which sends a request too.
        self._sending = threading.RLock()
        self.ended = False  # a child has seen its end; a killed process closes its files one after the other

    @property
    def hung_up(self) -> bool:
        """Return whether the process has closed its end. It never writes to the socket, so readable means closed."""
        return self.ended or bool(select.select([self._socket], [], [], 0)[0])

    def fork(self, fds: Sequence[int], kind: int = RANK) -> Child:
        """Fork a rank that owns ``fds``: its pipe, stdout, stderr, journal, and for rank 0 the listening socket."""
        reading, writing = os.pipe()
        try:
            with self._sending:
                socket.send_fds(self._socket, [HEADER.pack(FORK, len(fds) + 1, kind)], [writing, *fds])
        except OSError as error:
            os.close(reading)
            raise WorldUnavailable(
                f"the fork server does not answer: {error}; close this world and run again",
                cure="world.close()",
            ) from error
        finally:
            os.close(writing)
        return Child(reading, self)

    def signal(self, pid: int, signo: int) -> None:
        """Send a signal to a rank. The signal never reaches another process, even if the rank has ended."""
        try:
            self._send(SIGNAL, pid, signo)
        except OSError:  # the server has ended, and its ranks with it
            return

    def last_words(self) -> str:
        """Return the name of the process for reports and, if it is known, how it ended."""
        return FORKER

    def close(self) -> None:
        """Close this end. The process and all its forks then end, unless another process holds this end too."""
        self._socket.close()

    def _send(self, request: bytes, first: int, second: int, data: bytes = b"") -> None:
        with self._sending:
            self._socket.sendall(HEADER.pack(request, first, second) + data)


class ForkServer(Forker):
    """A child process that imports the modules of ranks and forks ranks. Use it through :func:`retain`."""

    def __init__(self, hash_seed: str = "", twin: ForkServer | None = None) -> None:
        self._twin = twin
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *_flags(),
                    "-c",
                    _BOOT,
                    repr(import_path()),
                    str(theirs.fileno()),
                    str(os.getpid()),
                    hash_seeds.VARIABLE if hash_seed else "",
                ],
                env=os.environ | ({hash_seeds.VARIABLE: hash_seed} if hash_seed else {}) | {SERVER: self._mark},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a Ctrl-C at the terminal reaches only the controller
            )
        super().__init__(ours, self._process.pid)
        self.environment = dict(os.environ)  # the ranks inherit it
        self._preloaded: set[str] = set()
        self.preload(_PRELOAD)

    @property
    def pids(self) -> list[int]:
        """Return the pids of the server and of its twin, if it has one."""
        return [self.pid] if self._twin is None else [self.pid, *self._twin.pids]

    @property
    def alive(self) -> bool:
        """Return whether the server and its twin run: False once one of them has ended or was stopped."""
        runs = self._process.poll() is None and not self.hung_up  # the hang-up is visible before the end of the process
        runs = runs and not is_stopped(self.pid)
        return runs and (self._twin is None or self._twin.alive)

    def of_rank(self, rank: int) -> ForkServer:
        """Return the server that forks this rank: this one or its twin."""
        return self._twin if self._twin is not None and rank % 2 else self

    def preload(self, names: Sequence[str]) -> None:
        """Import modules for the ranks that are forked from now on; a failure is reported when a rank starts."""
        new = [name for name in names if name not in self._preloaded]
        if new:
            self._preloaded.update(new)
            data = json.dumps(new).encode()
            self._send(IMPORT, len(data), 0, data)
        if self._twin is not None:
            self._twin.preload(names)

    def last_words(self) -> str:
        """Return the name of the server and, if it is known, how it ended."""
        words = super().last_words()
        with contextlib.suppress(subprocess.TimeoutExpired):
            exitcode = self._process.wait(timeout=SERVER_STOP_S)
            words += f", which {how_it_ended(exitcode) if exitcode < 0 else f'ended with exit code {exitcode}'}"
        return words

    def stop(self) -> None:
        """End the server and all of its ranks; wait for the server."""
        self.hang_up()
        self.await_end()

    def hang_up(self) -> None:
        """Close the connections to the server and to its twin, at which they end."""
        self._socket.close()
        if self._twin is not None:
            self._twin.hang_up()

    def await_end(self) -> None:
        """Wait for the ends of the server and of its twin after :meth:`hang_up`; kill one that does not end."""
        try:
            self._process.wait(timeout=SERVER_STOP_S)
        except subprocess.TimeoutExpired:  # it is starting, or loading a library
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:  # it was killed, and left the processes that its ranks have started
            end_marked(self._mark)
        if self._twin is not None:
            self._twin.await_end()

    def abandon(self) -> None:
        """Forget the server in a fork of this process, without ending it."""
        if self._twin is not None:
            self._twin.abandon()
        self._socket.close()
        self._process.returncode = 0  # only its parent can wait for it


def _flags() -> list[str]:
    return ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []


def _server() -> ForkServer:
    global _running
    twin: ForkServer | None = None
    if not hasattr(os, "fork"):
        raise WorldUnavailable(
            "local processes need fork, which this system lacks; use --world sim, or Linux, macOS or WSL",
            cure="wsl",
        )
    if _running is None or not _running.alive:
        if _running is not None:
            _running.stop()
        for hash_seed in reversed(hash_seeds.hash_seeds(*_hashes_by)):
            twin = ForkServer(hash_seed, twin)
        _running = twin
    assert _running is not None
    return _running


def _after_fork() -> None:
    global _kept, _lock, _running
    if _running is not None:
        _running.abandon()
    _kept, _lock, _running = False, threading.RLock(), None
    _users.clear()


_lock = threading.RLock()
_running: ForkServer | None = None
_hashes_by: tuple[int, int | None] = (0, None)  # the seed, and the rank of a launched process
_kept = False
_users: set[int] = set()
atexit.register(stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
