"""The communication of a wrapper beside its gradients, also that of a rank without further inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from pdlcheck.primitives.arguments import Members
from pdlcheck.primitives.broadcasts import broadcast_tensors
from pdlcheck.primitives.data_parallel.changes import Wrapped
from pdlcheck.primitives.data_parallel.reducer import Reducer
from pdlcheck.uncompiled import uncompiled

__all__ = ["Replica", "Shadow"]


@uncompiled
@dataclass(eq=False)
class Replica:
    """The replica of this rank: what it holds, and how it takes part in the communication of the others.

    Args:
        who: the ranks.
        wrapped: the contents of the module.
        reducer: reduces the gradients.
        device: the device for messages.
        divides_by_all: sums are divided by the number of all ranks, not of those that still have inputs.
    """

    who: Members
    wrapped: Wrapped
    reducer: Reducer
    device: torch.device
    divides_by_all: bool = True

    def tell(self, *, syncs: bool = False, buffers: bool = False, joined: bool = False) -> tuple[bool, bool]:
        """Exchange between all ranks which of them still have inputs, and whether those synchronise and take buffers.

        The last rank with inputs becomes the authority for the buffers, as in torch: its buffers have seen the most
        data.

        Args:
            syncs: whether this rank's backward pass will be synchronised.
            buffers: whether this rank's forward pass takes buffers.
            joined: whether this rank has no inputs left.

        Returns:
            Whether any rank synchronises, and whether any rank takes buffers.
        """
        told = torch.zeros(self.who.world_size + 2, dtype=torch.int64, device=self.device)
        told[self.who.rank] = not joined
        told[-2], told[-1] = syncs, buffers
        dist.all_reduce(told, group=self.who.group)
        *active, syncing, taking = told.tolist()
        self.reducer.authority = max(place for place, has_inputs in enumerate(active) if has_inputs)
        self.reducer.divisor = self.who.world_size if self.divides_by_all else sum(active)
        return bool(syncing), bool(taking)

    def take_buffers(self) -> str | None:
        """Broadcast the buffers; then return a description of their change on this rank, or None.

        The broadcast comes first, because the other ranks wait for it.
        """
        buffers, change = self.wrapped.buffers_to_take()
        if buffers:
            # Autograd must not count this change, so copy into `.data`: a batch norm may run twice before one backward
            # pass, which does not need its running statistics.
            uncounted = [buffer.data for buffer in buffers]
            broadcast_tensors(uncounted, self.who.at(self.reducer.authority), self.who.group)
        return change

    def take_model(self, *, is_last_joiner: bool, buffers: bool) -> None:
        """Copy the model of the last rank that had inputs to every rank, and end the join.

        Args:
            is_last_joiner: whether this rank was among the last with inputs.
            buffers: whether buffers are copied too.
        """
        last = torch.tensor([self.who.rank if is_last_joiner else -1], device=self.device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=self.who.group)
        held = {**self.wrapped.parameters, **(self.wrapped.buffers() if buffers else {})}
        broadcast_tensors(held.values(), self.who.at(int(last)), self.who.group)
        self.reducer.divisor, self.reducer.authority = self.who.world_size, 0


class Shadow(JoinHook):
    """The join hook of a wrapper: it matches the communication of one iteration of the other ranks at a time.

    Args:
        replica: the replica of this rank.
        syncs_buffers: returns whether forward passes of the wrapper copy buffers.
    """

    def __init__(self, replica: Replica, syncs_buffers: Callable[[], bool]) -> None:
        self._replica = replica
        self._syncs_buffers = syncs_buffers

    def main_hook(self) -> None:
        """Match the communication of one iteration of the ranks that still have inputs."""
        syncing, taking = self._replica.tell(joined=True)
        if taking and self._syncs_buffers():
            change = self._replica.take_buffers()
            self._replica.reducer.problems = [] if change is None else [change]
        if syncing:
            self._replica.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of the last rank that had inputs to every rank."""
        self._replica.take_model(is_last_joiner=is_last_joiner, buffers=self._syncs_buffers())
