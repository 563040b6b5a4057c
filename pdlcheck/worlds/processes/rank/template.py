"""The main program of a template: take a rank's place without a group, do the common work of all forks, fork ranks.

User code runs once in a template, and every fork has its effects. That is right for effects in memory. If there are
other effects, the template reports that it is unfit, and ends; see ``fork_safety.py``.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

from pdlcheck.worlds.processes.exchange.messages import Prepare, Prepared, put
from pdlcheck.worlds.processes.exchange.payload import load_call
from pdlcheck.worlds.processes.rank import import_time_rng
from pdlcheck.worlds.processes.rank.cuda_on_cpu import cuda_on_cpu
from pdlcheck.worlds.processes.rank.exit_callbacks import end
from pdlcheck.worlds.processes.rank.fork_safety import Watch, without_group
from pdlcheck.worlds.processes.rank.main import adopt, begin, fresh_state, take_place
from pdlcheck.worlds.processes.rank.main import main as rank_main
from pdlcheck.worlds.processes.rank.server import serve

__all__ = ["main"]


def main(fds: Sequence[int], missing: Mapping[str, str], server_pid: int, controller_pid: int) -> NoReturn:
    """Serve as the template of one rank.

    Args:
        fds: descriptors of the pipe, stdout, stderr and the journal.
        missing: preloaded modules that could not be imported, with the reason.
        server_pid: pid of the fork server.
        controller_pid: pid of the controller; the template ends with it.
    """
    begin(fds, server_pid)
    connection = Connection(fds[0])
    prepare: Prepare = connection.recv()
    take_place(prepare.start)
    unfit = _prepare(prepare)
    sys.stdout.flush()
    sys.stderr.flush()
    put(connection, Prepared(unfit))
    if unfit:
        end()
    gc.disable()  # as in the fork server
    serve(socket.socket(fileno=fds[0]), controller_pid, _program, dict(missing), own_fds=fds[1:])


def _prepare(prepare: Prepare) -> str:
    """Call the functions of ``prepare``; return why the process must not be forked then, empty if it may."""
    *ours, users = prepare.calls
    try:
        adopt(prepare.changes, prepare.start.variables)
        for payload in ours:
            _call(prepare, payload)
        watch = Watch()
        with without_group() as asked:
            _call(prepare, users)
    except BaseException as error:  # if a template is not the cause, the ranks will report it
        return f"{type(error).__name__}: {error}"
    return "it has asked for its group" if asked else watch.unfit()


def _call(prepare: Prepare, payload: bytes) -> None:
    fn, args, kwargs = load_call(payload)
    import_time_rng.begin(prepare.start.rank, prepare.seed)
    fresh_state(prepare.seed, prepare.start)
    with cuda_on_cpu():
        fn(*args, **kwargs)


def _program(kind: int, fds: Sequence[int], missing: Mapping[str, str], parent: int, controller: int) -> NoReturn:
    rank_main(fds, missing, parent, placed=True)
