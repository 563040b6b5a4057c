"""The process of every rank but 0 of a launched session: an agent, until the controller in rank 0's process ends it."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import signal
import sys

from pdlcheck.cores import usable_cores
from pdlcheck.errors import WorldUnavailable
from pdlcheck.launch.environment import INSIDE, Launch
from pdlcheck.time_budgets import GOODBYE_S, LAUNCHED_INTERRUPT_S
from pdlcheck.worlds.agents.agent import fork_ranks, own_address, software
from pdlcheck.worlds.agents.interfaces import interface_of
from pdlcheck.worlds.agents.messages import Absent, Hello
from pdlcheck.worlds.launched.meeting import reach
from pdlcheck.worlds.processes.controller import forkserver

__all__ = ["excuse", "serve", "variables"]

_INTERRUPTED = 2  # the exit code of pytest


def serve(launch: Launch) -> int:
    """Serve until rank 0 ends; return the exit code of rank 0, or 1 if it vanishes.

    Rank 0 handles Ctrl-C. If the signal reaches only this node, this process ends a moment later.
    """
    os.environ[INSIDE] = "1"
    forkserver.retain(launch)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.signal(signal.SIGINT, lambda *_: signal.setitimer(signal.ITIMER_REAL, LAUNCHED_INTERRUPT_S) and None)
    connections = reach(launch)
    control = next(connections)
    try:
        address = own_address(control)
        control.send(
            Hello(launch.rank, software(), variables(launch, address), usable_cores(), platform.node(), address),
        )
        exitcode = fork_ranks(launch.rank, control, connections, lambda: forkserver.retain(launch))
        signal.setitimer(signal.ITIMER_REAL, 0)
        control.poll(GOODBYE_S)  # wait until rank 0 has ended: launchers end it if another process fails first
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


def variables(launch: Launch, address: str) -> dict[str, str]:
    """Return the environment variables of ranks in this process's place, as far as this process can find them."""
    own = {} if launch.local_rank is None else {"LOCAL_RANK": str(launch.local_rank)}
    if launch.local_world_size is not None:
        own["LOCAL_WORLD_SIZE"] = str(launch.local_world_size)
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        own["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # MASTER_PORT of a rank is the port of its pool's store
    if (interface := interface_of(address)) and "GLOO_SOCKET_IFNAME" not in os.environ:
        own["GLOO_SOCKET_IFNAME"] = interface
    return own
