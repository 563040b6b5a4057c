"""The process that a remote world starts for a rank: an agent, until the controller ends it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from pdlcheck.cores import usable_cores
from pdlcheck.launch.nesting import INSIDE
from pdlcheck.worlds.agents.agent import fork_ranks, own_address, software
from pdlcheck.worlds.agents.door import enter
from pdlcheck.worlds.agents.interfaces import interface_of
from pdlcheck.worlds.agents.messages import Hello
from pdlcheck.worlds.processes.controller import forkserver
from pdlcheck.worlds.remote.ticket import VARIABLE, Ticket, ticket_of

__all__ = ["serve"]


def serve(variables: Mapping[str, str] | None = None) -> int:
    """Fork ranks for the controller until it ends this; return an exit code.

    Args:
        variables: the environment variables that the world's function got; default: those of this process.

    Raises:
        ValueError: the variables hold no ticket.
        OSError: the controller cannot be reached.
    """
    ticket = ticket_of(os.environ if variables is None else variables)
    os.environ.pop(VARIABLE, None)  # ranks do not inherit the key
    os.environ[INSIDE] = "1"
    forkserver.start(seed=ticket.seed, rank=ticket.rank)
    try:
        connections = _reach(ticket)
        control = next(connections)
        address = own_address(control)
        control.send(
            Hello(ticket.rank, software(), _variables(address), usable_cores(), platform.node(), address),
        )
        return fork_ranks(ticket.rank, control, connections, lambda: forkserver.retain(ticket))
    except EOFError:
        print(f"pdlcheck: the process of rank {ticket.rank} ends, as the controller has gone", file=sys.stderr)
        return 1
    finally:
        forkserver.stop()


def _reach(ticket: Ticket) -> Iterator[Connection[Any, Any]]:
    while True:
        yield enter(ticket.host, ticket.port, bytes.fromhex(ticket.key))


def _variables(address: str) -> dict[str, str]:
    """Return the environment variables of the rank that only its machine knows."""
    interface = interface_of(address)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if interface and name not in os.environ}
