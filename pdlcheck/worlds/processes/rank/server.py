"""A process that forks ranks: it waits, forks, and reports which ranks have ended; it never computes.

The fork server imports the modules that ranks need. It forks ranks, or templates, which serve in the same way.

A fork of a process that has used torch's threads hangs at its first parallel operation, so this process must only
import. The fork server of ``multiprocessing`` does the same job, but it does not fit here:

- It leaves the directory of its socket behind when the controller is killed.
- It imports the user's ``__main__`` again in every child.
- It hides errors of its preload list.
- There is only one for the whole program.

This server is reached through an unnamed socket pair, and ends with its controller.
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
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from pdlcheck.time_budgets import DESCENDANTS_S
from pdlcheck.worlds.processes.rank.orphans import adopt_orphans, are_found, children, end_orphans

__all__ = [
    "FORK",
    "HEADER",
    "IMPORT",
    "RANK",
    "SIGNAL",
    "STACK_SIGNAL",
    "STATUS",
    "TEMPLATE",
    "Program",
    "main",
    "serve",
]

HEADER = struct.Struct("!cii")  # request, two numbers
STATUS = struct.Struct("!i")  # sent through the status pipe of a fork: first its pid, later its exit code
FORK, IMPORT, SIGNAL = b"F", b"I", b"S"
RANK, TEMPLATE = 0, 1  # the kinds of forks
STACK_SIGNAL = signal.SIGUSR1  # a rank writes its stack at this signal, even while no Python code runs

_MAX_FDS = 8
_EX_SOFTWARE = 70

Program = Callable[[int, Sequence[int], Mapping[str, str], int, int], NoReturn]
_Handler = Callable[[int, FrameType | None], Any] | int | None


@dataclass(slots=True)
class _Forks:
    """The living forks of this process.

    Args:
        owner: pid of this process.
        status: the status pipe of each fork, by pid.
        templates: pids of the forks that fork ranks themselves.
        helpers: pids of other children, which imports have started.
        ending: True while all forks are being ended.
    """

    owner: int = field(default_factory=os.getpid)
    status: dict[int, int] = field(default_factory=dict)
    templates: set[int] = field(default_factory=set)
    helpers: set[int] = field(default_factory=set)
    ending: bool = False


def main(control_fd: int, controller_pid: int) -> NoReturn:
    """Run the fork server."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # for ranks, even if the shell ignores it
    gc.disable()  # a collection would leave holes, and filling them would copy pages in every rank
    serve(socket.socket(fileno=control_fd), controller_pid, _program, missing={}, own_fds=())


def serve(
    control: socket.socket, controller_pid: int, program: Program, missing: dict[str, str], own_fds: Sequence[int]
) -> NoReturn:
    """Serve requests until the controller has gone, then kill every rank.

    The requests are:

    - ``FORK n kind``, with n file descriptors: fork a rank or a template. The first descriptor is its status pipe, the
      others are the fork's own.
    - ``IMPORT n 0``, then n bytes of JSON: import these modules, for the ranks that are forked later.
    - ``SIGNAL pid signal``: send a signal to a rank.

    When a rank has ended, all processes that it started are killed.

    Args:
        control: the socket that requests come from.
        controller_pid: pid of the controller; this process ends with it.
        program: the function that a fork runs. Its arguments are the kind, the fork's descriptors, ``missing``, and the
            pids of this process and the controller.
        missing: modules that could not be imported, with the reason.
        own_fds: descriptors that forks do not need.
    """
    forks = _Forks(helpers=children(os.getpid()))
    adopt_orphans()
    handlers: dict[int, _Handler] = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),  # the controller handles Ctrl-C
        signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: None if forks.ending else _end(forks)),
    }
    wake_r, wake_w = socket.socketpair()
    wake_r.setblocking(False)
    wake_w.setblocking(False)
    signal.set_wakeup_fd(wake_w.fileno())
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_r, selectors.EVENT_READ)
    foreign = [*own_fds, control.fileno(), wake_r.fileno(), wake_w.fileno()]
    controller = _watch_process(controller_pid)
    if controller is not None:
        selector.register(controller, selectors.EVENT_READ)
        foreign.append(controller)
    while True:
        for key, _ in selector.select():
            if key.fileobj == controller:
                _end(forks)
            elif key.fileobj is wake_r:
                _drain(wake_r)
                _reap(forks)
            else:
                header, fds, _, _ = socket.recv_fds(control, HEADER.size, _MAX_FDS)
                if len(header) < HEADER.size:
                    _end(forks)
                request, first, second = HEADER.unpack(header)
                if request == FORK:
                    pid = _fork(fds, forks, second)
                    if pid == 0:
                        _restore(handlers)
                        for fd in (*foreign, fds[0], *forks.status.values()):
                            os.close(fd)
                        _become(program, second, fds[1:], missing, controller_pid)
                elif request == IMPORT:
                    names = json.loads(_read(control, first))
                    with _noticing_hang_up(control, forks):
                        missing |= _import(names)
                    forks.helpers = children(os.getpid()).difference(forks.status)
                elif request == SIGNAL and first in forks.status:
                    _signal(first, second)


def _watch_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if the system has none.

    Unlike the end of the socket, it works even if a child of the process holds the socket.
    """
    if not hasattr(os, "pidfd_open"):
        return None  # not Linux
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # an old kernel, or a sandbox; the end of the socket is detected as well


@contextlib.contextmanager
def _noticing_hang_up(control: socket.socket, forks: _Forks) -> Iterator[None]:
    """End this process if the controller ends while the block runs, because an import may take long.

    The thread that detects the end has itself ended before any fork.
    """
    done_r, done_w = os.pipe()
    poll = select.poll()
    poll.register(control, 0)
    poll.register(done_r, select.POLLIN)

    def watch() -> None:
        if done_r not in dict(poll.poll()):
            _end(forks)

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
        except (Exception, SystemExit) as error:  # the controller reports every error of a module
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def _fork(fds: list[int], forks: _Forks, kind: int) -> int:
    """Fork a rank or a template; return its pid, 0 in the fork, or -1 if the system refuses."""
    status, *rest = fds
    gc.freeze()  # imported objects stay; a garbage collection over them in a rank would copy them all
    try:
        pid = os.fork()
    except OSError as error:
        _tell(status, -(error.errno or 1))
        for fd in fds:
            os.close(fd)
        return -1
    if pid == 0:
        return 0
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # the child does it too, and either may be first
    forks.status[pid] = status
    if kind == TEMPLATE:
        forks.templates.add(pid)
    _tell(status, pid)
    for fd in rest:
        os.close(fd)
    return pid


def _restore(handlers: Mapping[int, _Handler]) -> None:
    signal.set_wakeup_fd(-1)
    for signo, handler in handlers.items():
        signal.signal(signo, handler if handler is not None else signal.SIG_DFL)  # None: it was not set from Python


def _become(program: Program, kind: int, fds: list[int], missing: dict[str, str], controller_pid: int) -> NoReturn:
    try:
        gc.enable()
        server = os.getppid()
        os.setpgid(0, 0)
        os.dup2(fds[1], 1)
        os.dup2(fds[2], 2)
        program(kind, fds, missing, server, controller_pid)
    except BaseException:
        for name, why in missing.items():  # a second import fails for another reason than the first
            print(f"the fork server could not import {name}: {why}", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(_EX_SOFTWARE)


def _program(kind: int, fds: Sequence[int], missing: Mapping[str, str], server: int, controller: int) -> NoReturn:
    if kind == TEMPLATE:
        from pdlcheck.worlds.processes.rank.template import main as template_main

        template_main(fds, missing, server, controller)
    from pdlcheck.worlds.processes.rank.main import main as rank_main  # preloaded; its errors reach stderr here

    rank_main(fds, missing, server)


def _signal(pid: int, signo: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if signo == signal.SIGKILL and not are_found():
            os.killpg(pid, signo)
        else:
            os.kill(pid, signo)


def _reap(forks: _Forks) -> None:
    ended: list[tuple[int, int]] = []  # the status pipe and the exit code of each
    for pid, status in list(forks.status.items()):
        waited_for, code = os.waitpid(pid, os.WNOHANG)
        if not waited_for:
            continue
        if not are_found():
            _signal(pid, signal.SIGKILL)  # the process group that it left behind
        del forks.status[pid]
        forks.templates.discard(pid)
        ended.append((status, os.waitstatus_to_exitcode(code)))
    end_orphans({*forks.status, *forks.helpers})
    for status, exitcode in ended:
        _tell(status, exitcode)
        os.close(status)


def _tell(status: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the controller has closed its end
        os.write(status, STATUS.pack(number))


def _end(forks: _Forks) -> NoReturn:
    if os.getpid() != forks.owner:  # the signal came to a fork that has no handlers of its own yet
        os._exit(_EX_SOFTWARE)
    forks.ending = True
    for pid in forks.templates:  # only they can find the processes that their ranks have started
        _signal(pid, signal.SIGTERM)
        _signal(pid, signal.SIGCONT)
    until = time.monotonic() + DESCENDANTS_S
    while any(_runs(pid) for pid in forks.templates) and time.monotonic() < until:
        time.sleep(0.001)
    leave_something = children(os.getpid()).difference(forks.status) or any(map(children, forks.status))
    for pid in forks.status:
        _signal(pid, signal.SIGKILL)
    until = time.monotonic() + DESCENDANTS_S
    while leave_something and end_orphans(()) and time.monotonic() < until:
        time.sleep(0.001)
    os._exit(0)


def _runs(pid: int) -> bool:
    """Return whether a child runs; an ended child is not reaped, so that its pid stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


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
