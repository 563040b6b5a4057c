"""The part of a rank without further inputs in the communication of the other ranks."""

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
    """Exchange between all ranks which of them still have inputs, and whether those synchronise and take buffers.

    The last rank with inputs becomes the authority for the buffers, as in torch: its buffers have seen the most data.

    Args:
        wrapper: the wrapper of this rank.
        syncs: whether this rank's backward pass will be synchronised.
        buffers: whether this rank's forward pass takes buffers.
        joined: whether this rank has no inputs left.

    Returns:
        Whether any rank synchronises, and whether any rank takes buffers.
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
    """The join hook of ``wrapper``: it matches the communication of one iteration at a time."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        """Match the communication of one iteration of the ranks that still have inputs."""
        syncing, taking = tell(self._wrapper, joined=True)
        if taking and self._wrapper.forward_sync_buffers:
            change = self._wrapper._take_buffers()
            self._wrapper._reducer.problems = [] if change is None else [change]
        if syncing:
            self._wrapper._reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of the last rank that had inputs to every rank."""
        wrapper, who = self._wrapper, self._wrapper._who
        last = torch.tensor([who.rank if is_last_joiner else -1], device=wrapper.device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=who.group)
        buffers = wrapper._wrapped.buffers() if wrapper.forward_sync_buffers else {}
        held = {**wrapper._wrapped.parameters, **buffers}
        broadcast_tensors(held.values(), who.at(int(last)), who.group)
        wrapper._reducer.divisor, wrapper._reducer.authority = who.world_size, 0
