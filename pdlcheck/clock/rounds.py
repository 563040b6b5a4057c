"""Collectives as rounds of messages; one definition gives the bytes that they move and the time that they take.

A collective has no messages of its own in the API; a backend picks an algorithm by size and machine. Here each has one:

================= ======================== ============================= ===========================
collective        algorithm                bytes a rank sends            time, equal links
================= ======================== ============================= ===========================
all_reduce        ring                     2 (N-1)/N B                   2 (N-1) (a + B / (N b))
reduce_scatter    ring                     (N-1)/N B                     (N-1) (a + B / (N b))
all_gather        ring                     (N-1) B                       (N-1) (a + B / b)
broadcast         binomial tree            (N-1) B, all ranks together   ceil(log2 N) (a + B / b)
reduce            binomial tree            (N-1) B, all ranks together   ceil(log2 N) (a + B / b)
gather, scatter   the root, one by one     B, or (N-1) B of the root     (N-1) (a + B / b)
all_to_all        pairwise exchange        all but its own piece         (N-1) (a + B / (N b))
barrier           dissemination            ceil(log2 N) empty messages   ceil(log2 N) a
monitored_barrier through rank 0           1 empty, or N-1 of rank 0     2 (N-1) a
================= ======================== ============================= ===========================

N is the number of ranks, a the latency in s, b the bandwidth. B is the tensor that a rank passes in (for a broadcast or
scatter, the tensor that a rank receives). The additions of a reduction take no time. A coalesced call counts as one
tensor made of all its tensors.

Sources: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69 (2009); R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005); D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier
synchronization", Int. J. Parallel Program. 17 (1988).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pdlcheck.clock.links import Topology

__all__ = ["ALGORITHMS", "Payload", "rounds", "seconds"]

ALGORITHMS = {
    "all_gather": "ring",
    "all_reduce": "ring",
    "all_to_all": "pairwise exchange",
    "barrier": "dissemination",
    "broadcast": "binomial tree",
    "gather": "one by one",
    "monitored_barrier": "through rank 0",
    "reduce": "binomial tree",
    "reduce_scatter": "ring",
    "scatter": "one by one",
}
Payload = tuple[int, ...]
"""In bytes. all_reduce: (tensor, one element); all_gather, broadcast, gather, reduce: (tensor,); reduce_scatter,
scatter: the piece of each rank; all_to_all: the pieces that rank 0 gives, those of rank 1, ...; barrier: none."""
Round = list[tuple[int, int, int]]  # simultaneous messages (source, destination, bytes); numbers in the group


def rounds(op: str, world_size: int, root: int, payload: Payload) -> Iterator[Round]:
    """Return the messages of one collective, round by round.

    Args:
        op: a name in ``ALGORITHMS``; any other collective has no messages.
        world_size: number of ranks of the group.
        root: the number of the source or destination in the group, if there is one.
        payload: the bytes of the tensors, see ``Payload``.

    Example:
        >>> list(rounds("broadcast", 4, 1, (8,)))
        [[(1, 2, 8)], [(1, 3, 8), (2, 0, 8)]]
    """
    return _ROUNDS.get(op, _none)(world_size, root, payload)


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


def _none(n: int, root: int, payload: Payload) -> Iterator[Round]:
    return iter(())


def _ring(n: int, pieces: Sequence[int], first: int) -> Iterator[Round]:
    """Yield rounds in which every rank passes a piece to the right.

    In the first round a rank passes the piece of the rank ``first`` places to its left.
    """
    for step in range(first, first + n - 1):
        yield [(place, (place + 1) % n, pieces[(place - step) % n]) for place in range(n)]


def _all_reduce(n: int, root: int, payload: Payload) -> Iterator[Round]:
    nbytes, element = payload
    short, longer = divmod(nbytes // element, n)
    pieces = [(short + (place < longer)) * element for place in range(n)]  # the sizes of tensor_split
    yield from _ring(n, pieces, 1)
    yield from _ring(n, pieces, 0)


def _reduce_scatter(n: int, root: int, payload: Payload) -> Iterator[Round]:
    return _ring(n, payload, 1)


def _all_gather(n: int, root: int, payload: Payload) -> Iterator[Round]:
    return _ring(n, payload * n, 0)


def _broadcast(n: int, root: int, payload: Payload) -> Iterator[Round]:
    have = 1  # ranks that hold the tensor
    while have < n:
        yield [((root + k) % n, (root + k + have) % n, payload[0]) for k in range(min(have, n - have))]
        have *= 2


def _reduce(n: int, root: int, payload: Payload) -> Iterator[Round]:
    for messages in reversed(list(_broadcast(n, root, payload))):
        yield [(dst, src, nbytes) for src, dst, nbytes in messages]


def _gather(n: int, root: int, payload: Payload) -> Iterator[Round]:
    return iter([[(place, root, payload[0])] for place in range(n) if place != root])


def _scatter(n: int, root: int, payload: Payload) -> Iterator[Round]:
    return iter([[(root, place, payload[place])] for place in range(n) if place != root])


def _all_to_all(n: int, root: int, payload: Payload) -> Iterator[Round]:
    for step in range(1, n):
        yield [(place, to, payload[place * n + to]) for place in range(n) for to in [(place + step) % n]]


def _barrier(n: int, root: int, payload: Payload) -> Iterator[Round]:
    step = 1
    while step < n:
        yield [(place, (place + step) % n, 0) for place in range(n)]
        step *= 2


def _monitored_barrier(n: int, root: int, payload: Payload) -> Iterator[Round]:
    yield from _gather(n, 0, (0,))
    yield from _scatter(n, 0, (0,) * n)


_ROUNDS: dict[str, Callable[[int, int, Payload], Iterator[Round]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "monitored_barrier": _monitored_barrier,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}
