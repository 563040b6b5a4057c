"""The agreement of a pipeline's ranks at the start of a step, so that all ranks go on or all raise the same error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Agreement", "Header"]


@dataclass(frozen=True)
class Header:
    """The facts that one rank has at the start of a step; None stands for an unknown one.

    Args:
        n_samples: samples in the batch. Rank 0 takes it from the inputs, the last rank from the targets.
        weight: the weight of the batch, on the last rank.
        weights: the weight of each micro-batch, or -1 on a rank that does not have it; empty if not needed.
        situation: the rank's own number for the facts that decide the forms of messages: its part of the batch and its
            mode.
        backward: whether the call includes backward passes.
        failed: whether this rank cannot take the step.
        differ: two numbers of samples, if ranks have unequal ones.
        situations: the situations of all ranks, in the order of the group.
        backwards: the same for ``backward``.
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
        """Return whether the rank at ``place`` is in the same situation as when ``agreed`` was found."""
        own = self.situation, self.backward
        return not self.failed and own == (agreed.situations[place], agreed.backwards[place])


class Agreement:
    """One small all_reduce over the pipeline at the start of a step; it runs during the first pass.

    Args:
        own: the facts of this rank.
        group: the ranks of the pipeline; None if there is only this process.
        device: a device that the group's backend supports.
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
        """Return the combined facts of all ranks, the same on each rank.

        ``failed`` is also set if two ranks have different numbers of samples.
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
