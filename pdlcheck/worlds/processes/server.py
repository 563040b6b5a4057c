"""The process that forks ranks. It imports, waits, forks and reports who ended; it never computes.

A fork of a process that has used torch's threads hangs at its first parallel operation, so this process must
only import. ``multiprocessing``'s fork server does the same job but leaves its socket's directory behind when
the controller is killed, imports the user's ``__main__`` again in every child, hides errors of its preload
list, and there is one for the whole program; this one is reached through a nameless socket pair and dies with
its controller.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

__all__ = ["FORK", "HEADER", "IMPORT", "SIGNAL", "STATUS", "main"]

HEADER = struct.Struct("!cii")  # request, two numbers
STATUS = struct.Struct("!i")  # through a rank's status pipe: first its pid, at its end the exit code
FORK, IMPORT, SIGNAL = b"F", b"I", b"S"

_MAX_FDS = 8
_EX_SOFTWARE = 70


def main(control_fd: int, controller_pid: int) -> NoReturn:
    """Serve requests until the controller has gone, then kill every rank.

    FORK n 0, with n file descriptors: fork a rank; the first is its status pipe, the others are the rank's.
    IMPORT n 0, then n bytes of JSON: import these modules, for the ranks forked from now on.
    SIGNAL pid signal: send a signal to a rank; SIGKILL also to all processes that it started.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle
    gc.disable()  # a collection would leave holes, which are filled in every rank's own copy of the page
    control = socket.socket(fileno=control_fd)
    wake_r, wake_w = socket.socketpair()
    wake_r.setblocking(False)
    wake_w.setblocking(False)
    signal.set_wakeup_fd(wake_w.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_r, selectors.EVENT_READ)
    own_fds = [control.fileno(), wake_r.fileno(), wake_w.fileno()]
    controller = _watch_process(controller_pid)
    if controller is not None:
        selector.register(controller, selectors.EVENT_READ)
        own_fds.append(controller)
    ranks: dict[int, int] = {}  # pid -> status pipe
    missing: dict[str, str] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj == controller:
                _end(ranks)
            elif key.fileobj is wake_r:
                _drain(wake_r)
                _reap(ranks)
            else:
                header, fds, _, _ = socket.recv_fds(control, HEADER.size, _MAX_FDS)
                if len(header) < HEADER.size:
                    _end(ranks)
                request, first, second = HEADER.unpack(header)
                if request == FORK:
                    _fork(fds, ranks, missing, own_fds)
                elif request == IMPORT:
                    names = json.loads(_read(control, first))
                    with _noticing_hang_up(control, ranks):
                        missing |= _import(names)
                elif request == SIGNAL and first in ranks:
                    _signal(first, second)


def _watch_process(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, even if a child of it holds our socket."""
    if not hasattr(os, "pidfd_open"):
        return None  # not Linux
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # an old kernel, or a sandbox; the end of the socket tells as well


@contextlib.contextmanager
def _noticing_hang_up(control: socket.socket, ranks: dict[int, int]) -> Iterator[None]:
    """An import may take long, and the controller may end meanwhile: a thread notices. It has ended before any fork."""
    done_r, done_w = os.pipe()
    poll = select.poll()
    poll.register(control, 0)
    poll.register(done_r, select.POLLIN)

    def watch() -> None:
        if done_r not in dict(poll.poll()):
            _end(ranks)

    watching = threading.Thread(target=watch, name="pdlcheck hang-up")
    watching.start()
    try:
        yield
    finally:
        os.write(done_w, b".")
        watching.join()
        os.close(done_r)
        os.close(done_w)


def _import(names: list[str]) -> dict[str, str]:
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # whatever the module does: the controller reports it
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def _fork(fds: list[int], ranks: dict[int, int], missing: dict[str, str], own_fds: list[int]) -> None:
    status, *rank_fds = fds
    gc.freeze()  # what was imported stays; a rank that looked through it for garbage would copy all of it
    try:
        pid = os.fork()
    except OSError as error:
        _tell(status, -(error.errno or 1))
        for fd in fds:
            os.close(fd)
        return
    if pid == 0:
        _become_rank(rank_fds, missing, [*own_fds, status, *ranks.values()])
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # the child does it too: whoever is first
    ranks[pid] = status
    _tell(status, pid)
    for fd in rank_fds:
        os.close(fd)


def _become_rank(rank_fds: list[int], missing: dict[str, str], foreign_fds: list[int]) -> NoReturn:
    try:
        gc.enable()
        server = os.getppid()
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd in foreign_fds:
            os.close(fd)
        os.dup2(rank_fds[1], 1)
        os.dup2(rank_fds[2], 2)
        from pdlcheck.worlds.processes.rank import (
            main as rank_main,
        )  # preloaded; here its errors reach stderr

        rank_main(rank_fds, missing, server)
    except BaseException:
        for name, why in missing.items():  # a second attempt at an import fails for another reason than the first
            print(f"the fork server could not import {name}: {why}", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(_EX_SOFTWARE)


def _signal(pid: int, signo: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if signo == signal.SIGKILL:
            os.killpg(pid, signo)
        else:
            os.kill(pid, signo)


def _reap(ranks: dict[int, int]) -> None:
    for pid, status in list(ranks.items()):
        ended, code = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        _signal(pid, signal.SIGKILL)  # what the rank started and left behind
        del ranks[pid]
        _tell(status, os.waitstatus_to_exitcode(code))
        os.close(status)


def _tell(status: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the controller no longer listens
        os.write(status, STATUS.pack(number))


def _end(ranks: dict[int, int]) -> NoReturn:
    for pid in list(ranks):
        _signal(pid, signal.SIGKILL)
    os._exit(0)


def _drain(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while sock.recv(4096):
            pass


def _read(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data
