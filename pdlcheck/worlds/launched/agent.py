"""The agent: a process of a launched session that forks ranks for rank 0's controller.

Every launched process except rank 0 runs an agent until the controller sends ``Bye``. The launched process itself never
computes and joins no process group. So a killed rank can be replaced, and a pool of fewer ranks has its own default
group.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

from pdlcheck.cores import usable_cores
from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.launched.environment import INSIDE, Launch
from pdlcheck.worlds.launched.interfaces import addresses
from pdlcheck.worlds.launched.meeting import reach
from pdlcheck.worlds.launched.messages import (
    Absent,
    AsksHowLong,
    Bye,
    Ended,
    Fork,
    Hello,
    IsStopped,
    Link,
    Output,
    Rewind,
    Signal,
    Started,
    Stopped,
    WaitedForCores,
    Written,
)
from pdlcheck.worlds.processes.controller import forkserver
from pdlcheck.worlds.processes.controller.local import LocalProcess
from pdlcheck.worlds.processes.controller.output_file import BOUND_S

__all__ = ["excuse", "serve", "software", "variables"]

_GOODBYE_S = 60.0
_INTERRUPTED = 2  # the exit code of pytest
_INTERRUPTED_S = 5.0


def serve(launch: Launch) -> int:
    """Serve until rank 0 ends; return the exit code of rank 0, or 1 if it vanishes.

    Rank 0 handles Ctrl-C. If the signal reaches only this node, this process ends a moment later.
    """
    os.environ[INSIDE] = "1"
    forkserver.retain(launch)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.signal(signal.SIGINT, lambda *_: signal.setitimer(signal.ITIMER_REAL, _INTERRUPTED_S) and None)
    connections = reach(launch)
    control = next(connections)
    try:
        address = _own_address(control)
        control.send(
            Hello(launch.rank, software(), variables(launch, address), usable_cores(), platform.node(), address),
        )
        while True:
            match control.recv():
                case Fork(fork=fork):
                    _fork(launch, fork, connections)
                case Bye(exitcode=exitcode):
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    # Wait until rank 0 has ended: launchers end it if another process fails first.
                    control.poll(_GOODBYE_S)
                    return exitcode
    except (EOFError, OSError) as error:
        print(f"pdlcheck: rank {launch.rank} ends, as rank 0 has gone ({error!r})", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        why = "it was interrupted, and rank 0 was not"
        print(f"pdlcheck: rank {launch.rank} ends, as {why}", file=sys.stderr, flush=True)
        # The ranks end with this process. If they were killed earlier, rank 0 would report their ends instead.
        os._exit(_INTERRUPTED)
    finally:
        forkserver.stop()
        # Launchers wait for the end of this process. A garbage collection over all of torch would take 0.3 s.
        gc.freeze()


def excuse(launch: Launch, why: str) -> None:
    """Report to rank 0 that this process cannot serve; then wait until rank 0 ends.

    Launchers end all processes when one has failed, so this process must not end first.
    """
    with contextlib.suppress(WorldUnavailable, EOFError, OSError):  # rank 0 has ended, or never came
        control = next(reach(launch))
        control.send(Absent(launch.rank, platform.node(), why))
        control.recv()


def software() -> dict[str, str]:
    """Return the versions that must agree between the processes of a launch."""
    names = ("pdlcheck", "torch", "numpy", "pytest", "hypothesis", "cloudpickle")
    python = ".".join(platform.python_version_tuple()[:2])  # messages are compatible within one minor version
    return {"python": python, **{name: version(name) for name in names}}


def variables(launch: Launch, address: str) -> dict[str, str]:
    """Return the environment variables of ranks in this process's place, as far as this process can find them."""
    own = {} if launch.local_rank is None else {"LOCAL_RANK": str(launch.local_rank)}
    if launch.local_world_size is not None:
        own["LOCAL_WORLD_SIZE"] = str(launch.local_world_size)
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        own["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # MASTER_PORT of a rank is the port of its pool's store
    interface = next((name for name, its in addresses() if its == address), "")
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        own["GLOO_SOCKET_IFNAME"] = interface
    return own


def _own_address(connection: Connection[Any, Any]) -> str:
    with socket.socket(fileno=os.dup(connection.fileno())) as connected:
        return str(connected.getsockname()[0])


def _fork(launch: Launch, fork: int, connections: Iterator[Connection[Any, Any]]) -> None:
    pipe = next(connections)
    pipe.send(Link(launch.rank, fork, is_pipe=True))
    about = next(connections)
    about.send(Link(launch.rank, fork, is_pipe=False))
    with pipe:
        try:
            process = LocalProcess(forkserver.retain(launch), about, pipe, ())  # a new server if the old one has ended
        except WorldUnavailable as error:
            with about:
                about.send(Started(-1, str(error)))
            return
    threading.Thread(target=_attend, args=(process, about), daemon=True).start()


def _attend(process: LocalProcess, about: Connection[Any, Any]) -> None:
    """Report one process to the controller, and carry out the controller's requests about it."""
    try:
        try:
            about.send(Started(process.started()))
        except WorldUnavailable as error:
            about.send(Started(-1, str(error)))
            return
        while True:
            watched = [about.fileno(), *([process.status] if process.exitcode is None else [])]
            readable, _, _ = select.select(watched, [], [], BOUND_S)
            process.bound_output()
            if process.status in readable and process.ended(0):
                exitcode = process.exitcode if process.exitcode is not None else -signal.SIGKILL
                about.send(Ended(exitcode, process.went_with))
            if about.fileno() in readable:
                match about.recv():
                    case Signal(signo=signo):
                        process.signal(signo)
                    case IsStopped():
                        about.send(Stopped(process.is_stopped()))
                    case AsksHowLong():
                        about.send(WaitedForCores(process.waited_for_cores()))
                    case Output():
                        about.send(Written(*process.output()))
                    case Rewind():
                        process.rewind()
    except (EOFError, OSError):  # the controller has abandoned this rank
        process.signal(signal.SIGKILL)
    finally:
        process.close()
