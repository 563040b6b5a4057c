"""A rank that has no inputs left takes part in what the others still do, with nothing of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from pdlcheck.primitives.broadcasts import broadcast_tensors

if TYPE_CHECKING:
    from pdlcheck.primitives.data_parallel.distributed import DistributedDataParallel

__all__ = ["Shadow", "tell"]


def tell(
    wrapper: DistributedDataParallel, *, syncs: bool = False, buffers: bool = False, joined: bool = False
) -> tuple[bool, bool]:
    """All ranks learn who still has inputs, and what those are about to do.

    The last rank that has some is the one whose buffers are taken, as with torch's: they have seen the most.
    """
    who, reducer = wrapper._who, wrapper._reducer
    told = torch.zeros(who.world_size + 2, dtype=torch.int64, device=wrapper.device)
    told[who.rank] = not joined
    told[-2], told[-1] = syncs, buffers
    dist.all_reduce(told, group=who.group)
    *active, syncing, taking = told.tolist()
    reducer.authority = max(place for place, has_inputs in enumerate(active) if has_inputs)
    reducer.divisor = who.world_size if wrapper._divides_by_all else sum(active)
    return bool(syncing), bool(taking)


class Shadow(JoinHook):
    """Matches the communication of one iteration of ``wrapper`` at a time."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        syncing, taking = tell(self._wrapper, joined=True)
        if taking and self._wrapper.forward_sync_buffers:
            change = self._wrapper._take_buffers()
            self._wrapper._reducer.problems = [] if change is None else [change]
        if syncing:
            self._wrapper._reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        wrapper, who = self._wrapper, self._wrapper._who
        last = torch.tensor([who.rank if is_last_joiner else -1], device=wrapper.device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=who.group)
        buffers = wrapper._wrapped.buffers() if wrapper.forward_sync_buffers else {}
        held = {**wrapper._wrapped.parameters, **buffers}
        broadcast_tensors(held.values(), who.at(int(last)), who.group)
        wrapper._reducer.divisor, wrapper._reducer.authority = who.world_size, 0
