"""Whether each machine has the memory for what its ranks are about to hold; all go on, or all raise the same."""

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
    """A memory that ranks share: the name of the machine, or of its GPU, and the bytes that are free, if known."""

    name: str
    free: int | None


def stores_of(nbytes: int, who: Members) -> list[Store]:
    """Where this rank keeps what it works on: on its machine, and on a GPU where messages leave from there.

    What is free is not asked where ranks like this one need less than 64 MB together.
    """
    asked, device = nbytes * who.world_size >= SMALL, wire_device(who.group)
    host = socket.gethostname()
    stores = [Store(host, free_memory() if asked else None)]
    if device.type == "cuda":
        stores.append(Store(f"{device} of {host}", free_on(device) if asked else None))
    return stores


def require_room(what: str, stores: Sequence[Sequence[Store]], nbytes: Sequence[int], who: Members, cure: str) -> None:
    """Raise MemoryError where the ranks that share a memory need more together than is free there.

    Args:
        what: that needs it; first in the message.
        stores, nbytes: of each place of the group; the same on every rank.
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
    """Raise MemoryError, on every rank, where a machine has no room to bring its ranks their edges.

    Args:
        edges: that this rank holds.
        partition: of their nodes.
        given: how many vectors over all nodes each rank was given.
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
