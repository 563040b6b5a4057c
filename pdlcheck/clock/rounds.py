"""Collectives as rounds of messages; one definition gives the bytes that they move and the time that they take.

A collective has no messages of its own in the API; a backend picks an algorithm by size and machine. Here each has one,
which stands in its file in :mod:`pdlcheck.operations` with the bytes that a rank sends and the time on equal links.

N is the number of ranks, a the latency in s, b the bandwidth. B is the tensor that a rank passes in (for a broadcast or
scatter, the tensor that a rank receives). The additions of a reduction take no time. A coalesced call counts as one
tensor made of all its tensors.

Sources: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69 (2009); R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005); D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier
synchronization", Int. J. Parallel Program. 17 (1988).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdlcheck.clock.links import Topology
from pdlcheck.operations.rounds import Payload, Round
from pdlcheck.operations.table import OPERATIONS

__all__ = ["ALGORITHMS", "Payload", "rounds", "seconds"]

ALGORITHMS = {name: kind.algorithm for name, kind in OPERATIONS.items() if kind.algorithm}


def rounds(op: str, world_size: int, root: int, payload: Payload) -> Iterator[Round]:
    """Return the messages of one collective, round by round.

    Args:
        op: a name in ``ALGORITHMS``; any other collective has no messages.
        world_size: number of ranks of the group.
        root: the number of the source or destination in the group, if there is one.
        payload: the bytes of the tensors, as the operation counts them.

    Example:
        >>> list(rounds("broadcast", 4, 1, (8,)))
        [[(1, 2, 8)], [(1, 3, 8), (2, 0, 8)]]
    """
    kind = OPERATIONS.get(op)
    return iter(()) if kind is None else kind.rounds(world_size, root, payload)


def seconds(op: str, members: Sequence[int], root: int, payload: Payload, topology: Topology) -> float:
    """Return the time of one collective: the sum over rounds of the slowest message of each round.

    Example:
        >>> from pdlcheck.clock import Link
        >>> seconds("barrier", range(8), 0, (), Topology(intra=Link(latency_s=2.0)))
        6.0
    """
    return sum(
        max(topology.link(members[src], members[dst]).seconds(nbytes) for src, dst, nbytes in messages)
        for messages in rounds(op, len(members), root, payload)
    )
