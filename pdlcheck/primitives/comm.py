"""Ring, star and tree collectives, made of messages between two ranks.

All of them work on any process group. If the group does not start at rank 0, a place in the group and a global rank
differ. Messages are addressed by global rank; ``arguments.Members`` translates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.arguments import Members, members, require_tensor

__all__ = [
    "ring_all_gather",
    "ring_all_reduce",
    "ring_pass",
    "ring_reduce_scatter",
    "star_broadcast",
    "tree_broadcast",
]


def ring_pass(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Pass rank 0's ``tensor`` once around the ring 0 -> 1 -> 2 -> ... -> 0; every rank adds 1 to it.

    The cost is ``world_size`` messages, one after the other (none if world_size is 1).

    Args:
        tensor: any shape, same shape and dtype on every rank, contiguous; only rank 0's values matter.
        group: process group; ``None`` is the default group. "Rank" means a place in this group.

    Returns:
        ``tensor`` itself, overwritten. On ranks 1, 2, ... it holds rank 0's values plus ``rank + 1``. On rank 0 it
        holds the tensor after a full turn: its values plus ``world_size``.

    Raises:
        TypeError: ``tensor`` is not a tensor, or holds booleans.
        ValueError: ``tensor`` is not contiguous, not dense, or on a device that the backend does not support; there is
            no process group, or this rank is outside of it.

    Example:
        >>> world.run(lambda: ring_pass(torch.zeros(1)).item(), world_size=3)
        [3.0, 2.0, 3.0]

    Source: the ring of D. Gannon, "Doing Deep Learning in Parallel with PyTorch" (2020).
    """
    who = members("ring_pass", group)
    flat = require_tensor("ring_pass", tensor, group, arithmetic=True).detach().view(-1)
    if who.rank > 0:
        dist.recv(flat, who.at(who.rank - 1), who.group)
    flat += 1
    if who.world_size > 1:
        dist.send(flat, who.at(who.rank + 1), who.group)
        if who.rank == 0:
            dist.recv(flat, who.at(-1), who.group)
    return tensor


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum ``tensor`` over the ranks of ``group``, in place, along a ring.

    The function runs a reduce-scatter, then an all-gather. Each rank sends ``2 * (world_size - 1)`` messages of about
    ``numel / world_size`` elements, so the bytes a link carries stay below twice the tensor for any world_size. Every
    element is summed on one rank only, so the result is equal bit for bit on every rank.

    Args:
        tensor: any shape, also 0-dimensional or without elements; same shape and dtype on every rank; contiguous.
        group: process group; ``None`` is the default group.

    Returns:
        ``tensor`` itself, equal bit for bit on every rank.

    Raises:
        TypeError, ValueError: as in :func:`ring_pass`.

    Example:
        >>> world.run(lambda: ring_all_reduce(torch.ones(2)).tolist(), world_size=3)
        [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]

    Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
    Distrib. Comput. 69 (2009).
    """
    who = members("ring_all_reduce", group)
    flat = require_tensor("ring_all_reduce", tensor, group, arithmetic=True).detach().view(-1)
    chunks = flat.tensor_split(who.world_size)
    _reduce_around_the_ring(chunks, who)
    _gather_around_the_ring(chunks, who)
    return tensor


def ring_reduce_scatter(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum ``tensor`` over the ranks of ``group``; each rank gets its part of the rows of the sum.

    The cost is ``world_size - 1`` messages of one part each.

    Args:
        tensor: at least one dimension; same shape and dtype on every rank; contiguous; not modified.
        group: process group; ``None`` is the default group.

    Returns:
        Part r of ``sum.tensor_split(world_size)`` on rank r. The first ``rows % world_size`` parts have one row more
        than the others. If there are fewer rows than ranks, some parts are empty.

    Raises:
        TypeError, ValueError: as in :func:`ring_pass`; ValueError for a tensor without dimensions.

    Example:
        >>> world.run(lambda: ring_reduce_scatter(torch.arange(3.0)).tolist(), world_size=2)
        [[0.0, 2.0], [4.0]]

    Source: as :func:`ring_all_reduce`.
    """
    who = members("ring_reduce_scatter", group)
    require_tensor("ring_reduce_scatter", tensor, group, arithmetic=True)
    if tensor.dim() == 0:
        raise ValueError("ring_reduce_scatter needs a dimension to split, got a 0-dimensional tensor; call .view(1)")
    chunks = tensor.detach().clone().tensor_split(who.world_size)
    _reduce_around_the_ring(chunks, who)
    return chunks[who.rank].clone()


def ring_all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather the ``tensor`` of every rank on every rank.

    The cost is ``world_size - 1`` messages of the tensor's size.

    Args:
        tensor: any shape; same shape and dtype on every rank; contiguous; not modified.
        group: process group; ``None`` is the default group.

    Returns:
        A new tensor of shape ``(world_size, *tensor.shape)``; row r is the tensor of rank r.

    Raises:
        TypeError, ValueError: as in :func:`ring_pass`, except that booleans are allowed.

    Example:
        >>> world.run(lambda: ring_all_gather(torch.tensor(dist.get_rank())).tolist(), world_size=3)
        [[0, 1, 2], [0, 1, 2], [0, 1, 2]]

    Source: as :func:`ring_all_reduce`.
    """
    who = members("ring_all_gather", group)
    require_tensor("ring_all_gather", tensor, group)
    gathered = torch.empty((who.world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    gathered[who.rank] = tensor.detach()
    _gather_around_the_ring(gathered.unbind(), who)
    return gathered


def star_broadcast(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """Copy ``src``'s ``tensor`` to every rank; ``src`` sends to each rank itself.

    The cost is ``world_size - 1`` messages, all through the link of ``src``.

    Args:
        tensor: any shape; same shape and dtype on every rank; contiguous; overwritten on all ranks except ``src``.
        src: a global rank, as in ``torch.distributed.broadcast``; must be in ``group``.
        group: process group; ``None`` is the default group.

    Returns:
        ``tensor`` itself, equal bit for bit on every rank.

    Raises:
        TypeError, ValueError: as in :func:`ring_pass`, except that booleans are allowed; ValueError for a ``src``
            outside the group.

    Example:
        >>> world.run(lambda: star_broadcast(torch.tensor([dist.get_rank()]), src=2).item(), world_size=3)
        [2, 2, 2]

    Source: the weights that rank 0 sends to its siblings in D. Gannon (2020), see :func:`ring_pass`.
    """
    who = members("star_broadcast", group)
    centre = who.place_of("star_broadcast", src)
    flat = require_tensor("star_broadcast", tensor, group).detach().view(-1)
    if who.rank == centre:
        sends = [dist.isend(flat, rank, who.group) for rank in who.ranks if rank != src]
        for send in sends:
            _wait(send)
    else:
        dist.recv(flat, src, who.group)
    return tensor


def tree_broadcast(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """Copy ``src``'s ``tensor`` to every rank, along a binomial tree: each rank that holds it passes it on.

    The cost is ``world_size - 1`` messages in ``ceil(log2(world_size))`` rounds.

    Args:
        tensor: any shape; same shape and dtype on every rank; contiguous; overwritten on all ranks except ``src``.
        src: a global rank, as in ``torch.distributed.broadcast``; must be in ``group``.
        group: process group; ``None`` is the default group.

    Returns:
        ``tensor`` itself, equal bit for bit on every rank.

    Raises:
        TypeError, ValueError: as in :func:`star_broadcast`.

    Example:
        >>> world.run(lambda: tree_broadcast(torch.tensor([dist.get_rank()]), src=2).item(), world_size=3)
        [2, 2, 2]

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int.
    J. High Perform. Comput. Appl. 19 (2005).
    """
    who = members("tree_broadcast", group)
    root = who.place_of("tree_broadcast", src)
    flat = require_tensor("tree_broadcast", tensor, group).detach().view(-1)
    depth = (who.rank - root) % who.world_size  # place counted from the root
    have = 1  # number of ranks that hold the tensor: places root, ..., root + have - 1
    sends = []
    while have < who.world_size:
        if depth < have and depth + have < who.world_size:
            sends.append(dist.isend(flat, who.at(who.rank + have), who.group))
        elif have <= depth < 2 * have:
            dist.recv(flat, who.at(who.rank - have), who.group)
        have *= 2
    for send in sends:
        _wait(send)
    return tensor


def _reduce_around_the_ring(chunks: Sequence[Tensor], who: Members) -> None:
    """Leave the sum of chunk r on rank r; the other chunks hold partial sums afterwards."""
    scratch = torch.empty_like(chunks[0])  # the first chunk is the longest
    for step in range(1, who.world_size):
        outgoing = chunks[(who.rank - step) % who.world_size]
        incoming = chunks[(who.rank - step - 1) % who.world_size]
        arrived = scratch[: len(incoming)]
        _exchange(outgoing, arrived, who)
        incoming += arrived


def _gather_around_the_ring(chunks: Sequence[Tensor], who: Members) -> None:
    """Send chunk r from rank r to every rank; afterwards every rank has all chunks."""
    for step in range(who.world_size - 1):
        outgoing = chunks[(who.rank - step) % who.world_size]
        incoming = chunks[(who.rank - step - 1) % who.world_size]
        _exchange(outgoing, incoming, who)


def _exchange(outgoing: Tensor, incoming: Tensor, who: Members) -> None:
    """Send to the right neighbour while receiving from the left one.

    If every rank sent before it received, no rank would ever receive. The receive is posted first: otherwise gloo uses
    the two directions of a link between two ranks one after the other.
    """
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, incoming, who.at(who.rank - 1), who.group),
            dist.P2POp(dist.isend, outgoing, who.at(who.rank + 1), who.group),
        ]
    ):
        work.wait()


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # only a rank outside the group gets None, and members() raises there
    work.wait()
