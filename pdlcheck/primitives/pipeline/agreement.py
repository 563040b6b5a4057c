"""What ranks of a pipeline must know of one another: found out together, so that all go on or all raise the same."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Agreement", "Header"]


@dataclass(frozen=True)
class Header:
    """What one rank knows at the start of a step; None is what it does not know.

    Args:
        n_samples: in the batch: rank 0 knows it by the inputs, the last rank by the targets.
        weight: how much the batch counts, on the last rank.
        weights: how much each micro-batch counts, or -1 where a rank does not know; empty where nobody asks.
        situation: the rank's own number for what the forms of messages depend on: its part of the batch and its mode.
        backward: whether it is called for backward passes, too.
        failed: this rank cannot take the step.
        differ: numbers of samples, where ranks know unequal ones.
        situations, backwards: of all ranks, in the order of the group.
    """

    n_samples: int | None = None
    weight: float | None = None
    weights: tuple[float, ...] = ()
    situation: int = -1
    backward: bool = False
    failed: bool = False
    differ: tuple[int, int] | None = None
    situations: tuple[int, ...] = ()
    backwards: tuple[bool, ...] = ()

    def is_like(self, agreed: Header, place: int) -> bool:
        """Whether the rank at ``place``, which knows this, is where it was when ``agreed`` was found."""
        own = self.situation, self.backward
        return not self.failed and own == (agreed.situations[place], agreed.backwards[place])


class Agreement:
    """One small all_reduce over the pipeline at the start of a step, under way while the first pass is computed.

    Args:
        own: what this rank knows.
        group: the ranks of the pipeline; None where there is only this process.
        device: that the group's backend can take.
    """

    def __init__(self, own: Header, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._own = own
        n, weight = own.n_samples, own.weight
        place, n_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        values = [
            -1.0 if n is None else n,
            -math.inf if n is None else -n,
            -1.0 if weight is None else weight,
            float(own.failed),
            *own.weights,
            *(2.0 * own.situation + own.backward if rank == place else -math.inf for rank in range(n_ranks)),
        ]
        self._values: Tensor = torch.tensor(values, dtype=torch.float64, device=device)
        self._work = None
        if n_ranks > 1:
            self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, group=group, async_op=True)

    def settle(self) -> Header:
        """What the ranks know together, the same on each of them.

        ``failed`` is also set where two ranks know different numbers of samples.
        """
        if self._work is not None:
            self._work.wait()
        most, least, weight, failed, *others = self._values.tolist()
        weights, situations = others[: len(self._own.weights)], others[len(self._own.weights) :]
        differ = (int(-least), int(most)) if math.isfinite(least) and most != -least else None
        return Header(
            n_samples=int(most),
            weight=weight,
            weights=tuple(weights),
            failed=bool(failed) or differ is not None,
            differ=differ,
            situations=tuple(int(one // 2) for one in situations),
            backwards=tuple(one % 2 == 1 for one in situations),
        )
