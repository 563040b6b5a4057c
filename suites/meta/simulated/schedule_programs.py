"""Programs whose outcome depends on the schedule, each with a twin that is correct under all schedules."""

from __future__ import annotations

import torch
import torch.distributed as dist

BID, ROLE = 1, 2


def arrivals():
    """Return on rank 0 the order in which the others arrived."""
    if dist.get_rank():
        dist.send(torch.zeros(1), 0)
        return None
    return [dist.recv(torch.zeros(1)) for _ in range(dist.get_world_size() - 1)]


def first_come(fair=False):
    """Assume on rank 0 that rank 1 arrives first; with ``fair`` assume no order."""
    if dist.get_rank():
        dist.send(torch.zeros(1), 0)
        return
    order = [dist.recv(torch.zeros(1)) for _ in range(dist.get_world_size() - 1)]
    assert fair or order[0] == 1, f"rank {order[0]} came first"


def election(distinct=False):
    """Elect officers by the first three bids; the last rank bids three times, but takes at most two offices.

    distinct: no rank gets two offices.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    elected = torch.zeros(3, dtype=torch.int64)
    if rank == 0:
        bidders = [dist.recv(torch.zeros(1), tag=BID) for _ in range(last + 2)]
        elected[:] = torch.tensor((list(dict.fromkeys(bidders)) if distinct else bidders)[:3])
    else:
        bids = [dist.isend(torch.zeros(1), 0, tag=BID) for _ in range(3 if rank == last else 1)]
        for bid in bids:
            bid.wait()
    dist.broadcast(elected, 0)
    if rank == 0:
        for role, winner in enumerate(elected.tolist()):
            dist.send(torch.tensor([role]), winner, tag=ROLE)
    for _ in range(min(2, elected.tolist().count(rank))):
        dist.recv(torch.zeros(1, dtype=torch.int64), 0, tag=ROLE)
