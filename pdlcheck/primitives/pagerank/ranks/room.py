"""Checks that each machine has the memory for its ranks: every rank continues, or all raise the same error."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdlcheck.primitives.agreement import exchange
from pdlcheck.primitives.arguments import Members, wire_device
from pdlcheck.primitives.pagerank.arguments import free_on
from pdlcheck.primitives.pagerank.memory import SMALL, free_memory, rank_nbytes
from pdlcheck.primitives.pagerank.ranks.arguments import Edges
from pdlcheck.primitives.pagerank.ranks.partition import Partition

__all__ = ["Store", "require_room", "require_room_for_parts", "stores_of"]


@dataclass(frozen=True)
class Store:
    """A memory that ranks share: the name of the machine or of its GPU, and the free bytes, if known."""

    name: str
    free: int | None


def stores_of(nbytes: int, who: Members) -> list[Store]:
    """Return the memories that this rank works in: its machine's, and a GPU's if the group's messages leave from there.

    The free memory is not read if ranks like this one need less than 64 MB together.
    """
    asked, device = nbytes * who.world_size >= SMALL, wire_device(who.group)
    host = socket.gethostname()
    stores = [Store(host, free_memory() if asked else None)]
    if device.type == "cuda":
        stores.append(Store(f"{device} of {host}", free_on(device) if asked else None))
    return stores


def require_room(what: str, stores: Sequence[Sequence[Store]], nbytes: Sequence[int], who: Members, cure: str) -> None:
    """Raise MemoryError if the ranks that share a memory need more together than is free there.

    Args:
        what: the call that needs the memory; it begins the message.
        stores: the memories of each place of the group; the same on every rank.
        nbytes: the bytes that each place needs; the same on every rank.
        who: the ranks of the group.
        cure: the end of the message.
    """
    sharing: dict[str, list[tuple[int, Store]]] = {}
    for place, found in enumerate(stores):
        for store in found:
            sharing.setdefault(store.name, []).append((place, store))
    for name, there in sharing.items():
        known = [store.free for _, store in there if store.free is not None]
        needed = sum(nbytes[place] for place, _ in there)
        if known and needed > min(known):
            ranks = f"rank {who.ranks[there[0][0]]}" if len(there) == 1 else f"{len(there)} ranks"
            raise MemoryError(
                f"{what} needs {needed / 2**30:.1f} GiB for {ranks} on {name}, {min(known) / 2**30:.1f} GiB are free "
                f"there; {cure}"
            )


def require_room_for_parts(caller: str, edges: Edges, partition: Partition, given: int, who: Members) -> None:
    """Raise MemoryError, on every rank, if a machine has no room for the edges that come to its ranks.

    Args:
        caller: the function that the message names.
        edges: the edges that this rank holds.
        partition: the partition of their nodes.
        given: the number of vectors over all nodes that each rank was given.
        who: the ranks of the group.
    """
    num_nodes, weighted = edges.nodes.num_nodes, edges.weights is not None

    def needs(place: int, handled: int) -> int:
        return rank_nbytes(int(partition.num_nodes[place]), num_nodes, handled, given, weighted=weighted)

    own = needs(who.rank, 2 * len(edges.src) + int(partition.num_in_edges[who.rank]))
    everyone = exchange((stores_of(own, who), partition.counts(edges.src).tolist()), None, who.group).values
    sent = np.array([counts for _, counts in everyone], np.int64)
    handled = sent.sum(axis=0) + sent.sum(axis=1) + partition.num_in_edges
    require_room(
        f"{caller} of {num_nodes} nodes and {sent.sum()} edges",
        [stores for stores, _ in everyone],
        [needs(place, int(handled[place])) for place in range(who.world_size)],
        who,
        "use machines with more memory, or more of them",
    )
