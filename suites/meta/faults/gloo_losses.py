"""Run programs of ``loss_programs`` on gloo processes of which one really kills itself, sleeps, or never joins.

``python -m suites.meta.faults.gloo_losses CASES`` prints the results of each survivor's operations as JSON.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from . import loss_programs

WORLD_SIZE = 3
TIMEOUT_S, KNOWN_S, LIMIT_S = 2.0, 0.2, 20.0


class Case(NamedTuple):
    """A ``program`` in which rank ``lost`` is lost at its operation ``at`` by ``how``: kill, stall, absent."""

    program: str
    how: str
    at: int = 0
    lost: int = 1
    leaves: bool = False  # ranks that have finished end their processes at once


def recorder(told, about_to=lambda number: None):
    """Return the ``do`` of a program.

    It appends the result of each operation to ``told``, and calls ``about_to`` before each.
    """

    def do(operation, *args):
        about_to(len(told))
        try:
            value = operation(*args)
        except RuntimeError as error:
            told.append(f"{type(error).__name__}: {error}")
            return None
        told.append("ok")
        return value

    return do


def _rank(rank, port, case, pipe, all_in, all_told):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch logs each error
    if case.how != "absent":
        store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, rank == 0, timedelta(seconds=LIMIT_S))
        store.set_timeout(timedelta(seconds=TIMEOUT_S))
        all_in.wait(LIMIT_S)  # thirty processes that start at once take longer than the time limit of a program
        store = dist.PrefixStore("default_pg", store)  # as torch's rendezvous makes it
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=WORLD_SIZE)
        all_in.wait(LIMIT_S)  # an earlier loss would hit peers that still connect

    def about_to(number):
        if rank == case.lost and number == case.at:
            if case.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2 * LIMIT_S)
        elif number >= case.at and case.how == "kill":
            time.sleep(KNOWN_S)  # until its peers have detected the loss

    told = []
    getattr(loss_programs, case.program)(recorder(told, about_to), rank)
    pipe.send(told)
    if not case.leaves:
        all_told.wait(LIMIT_S)
    os._exit(0)


def _unused_port():
    """Return a port below those that the system assigns, so that no other program gets it before its rank listens."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", random.randrange(10_000, 32_768)))
            return free.getsockname()[1]


def start(case):
    """Start one program; return a function that waits for its end."""
    context = multiprocessing.get_context("fork")
    port, all_in, all_told = _unused_port(), context.Barrier(WORLD_SIZE), context.Event()
    pipes, processes = {}, []
    for rank in range(WORLD_SIZE):
        if case.how == "absent" and rank == case.lost:
            continue
        pipes[rank], other = context.Pipe(duplex=False)
        processes.append(context.Process(target=_rank, args=(rank, port, case, other, all_in, all_told), daemon=True))
        processes[-1].start()

    def finish():
        survivors = [rank for rank in pipes if rank != case.lost]
        told = {rank: pipes[rank].recv() if pipes[rank].poll(LIMIT_S) else ["nothing"] for rank in survivors}
        all_told.set()
        all_in.abort()  # releases its shared memory, which would otherwise serve the next program
        for process in processes:
            process.kill()
            process.join()
        return told

    return finish


def main(cases, together=10):
    ended = []
    for first in range(0, len(cases), together):
        begun = [start(Case(*case)) for case in cases[first : first + together]]
        ended += [finish() for finish in begun]
    print(json.dumps(ended))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
