"""A loss scaler whose ranks skip a step together and keep one scale."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pdlcheck.primitives.arguments import Members, members
from pdlcheck.primitives.precision.clip import clip_grad_norm
from pdlcheck.primitives.precision.rows import Rows, gather_rows, raise_everywhere

__all__ = ["DistributedGradScaler"]

SELF = "DistributedGradScaler"


class DistributedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for ranks that see different gradients: if one overflows, no rank steps.

    torch's own looks at the gradients of its own rank. With gradients synchronised before that, as by DDP, every rank
    sees the overflow; where each holds others (pipeline stages, ZeRO, sharded parameters, gradients that are
    synchronised after :meth:`unscale_`) the ranks part: some step, some do not, and the scales differ from then on.

    One all_gather of 64 bytes from each rank for each :meth:`unscale_`, explicit or by :meth:`step`; it carries the
    scale too, so that scales that differ already (a checkpoint loaded on one rank) are an error and not a
    wrong gradient. On a GPU the host waits for it. A rank without any gradient, or one that never called
    :meth:`scale` because a later stage computes the loss, takes part like the others.

    ``state_dict()`` is that of torch's scaler, numbers only; save it once and load it on every rank.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch. ``enabled=False`` for
            bfloat16; such a scaler does nothing and sends nothing.
        group: the ranks that step together; ``None`` is the default group.

    Raises:
        ValueError: from :meth:`unscale_` and :meth:`step`, on every rank: float16 gradients (their parameters should be
            float32, see :class:`MasterWeights`), ranks whose scales or factors differ, or no loss that was ever scaled.
        RuntimeError: ``unscale_`` is called twice between two ``update()``.

    Example:
        >>> def stages():
        ...     weight = torch.nn.Parameter(torch.ones(2))        # each rank has its own
        ...     optimizer = torch.optim.SGD([weight], lr=1.0)
        ...     scaler = DistributedGradScaler("cpu", init_scale=8.0)
        ...     scaler.scale(weight.sum()).backward()
        ...     weight.grad[0] *= float("inf") if dist.get_rank() == 1 else 1
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     return weight.tolist(), scaler.get_scale()
        >>> world.run(stages, world_size=2)
        [([1.0, 1.0], 4.0), ([1.0, 1.0], 4.0)]

    Source: P. Micikevicius et al., "Mixed precision training", ICLR (2018).
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._group = group
        self._scaled = False  # this rank has scaled a loss
        self._overflow: dict[int, bool] = {}  # of optimizers that are unscaled: a gradient of some rank overflowed

    def scale(self, outputs: Any) -> Any:
        """``outputs``, a tensor or several, times the scale."""
        self._scaled = True
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, and learn whether those of any rank overflowed."""
        if not self.is_enabled():
            return
        who = members(SELF, self._group)
        devices = (p.device for group in optimizer.param_groups for p in group["params"])
        device = next(devices, torch.device(self._device))
        super().scale(torch.zeros((), device=device))  # makes the scale on a rank that has no loss to scale
        problem: Exception | None = None
        try:
            super().unscale_(optimizer)
        except (RuntimeError, ValueError) as error:
            problem = error
        # The one place that touches what torch's scaler keeps for itself; FSDP's scaler does the same.
        found: dict[torch.device, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        overflow = any(bool(flag) for flag in found.values())
        state = self.state_dict()
        rows = gather_rows([problem is not None, overflow, self._scaled, *state.values()], who)
        raise_everywhere(f"{SELF}.unscale_", problem, rows, who)
        _require_same_state(list(state), rows, who)
        if not any(row[2] for row in rows):
            raise ValueError(f"{SELF}: no rank has scaled a loss; call scaler.scale(loss).backward()")
        self._overflow[id(optimizer)] = any(row[1] for row in rows)
        found[device] = torch.full((), float(self._overflow[id(optimizer)]), device=device)

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float, **keywords: Any) -> Tensor:
        """Unscale the gradients of ``optimizer`` unless that is done, then clip them by the norm of all ranks.

        Where a gradient overflowed, nothing is clipped, as the step is skipped: the norm is inf then.

        Args:
            optimizer: whose gradients.
            max_norm: above 0.
            keywords: of :func:`clip_grad_norm`.

        Returns:
            The norm before clipping, the same on every rank.
        """
        if self.is_enabled() and id(optimizer) not in self._overflow:
            self.unscale_(optimizer)
        if self._overflow.get(id(optimizer)):
            return torch.tensor(float("inf"), dtype=torch.float64)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return clip_grad_norm(parameters, max_norm, **{"group": self._group, **keywords})

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step()`` on every rank, or on none if a gradient of any rank overflowed."""
        if self.is_enabled() and "closure" not in kwargs and id(optimizer) not in self._overflow:
            self.unscale_(optimizer)  # before torch does: it lets fused optimizers look at their own rank alone
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """The scale of the next step, from what all ranks found: the same on each."""
        super().update(new_scale)
        self._overflow.clear()


def _require_same_state(names: list[str], rows: Rows, who: Members) -> None:
    for column, name in enumerate(names, start=3):
        if len({row[column] for row in rows}) > 1:
            values = ", ".join(f"rank {rank}: {row[column]:g}" for rank, row in zip(who.ranks, rows, strict=True))
            raise ValueError(
                f"{SELF} needs the same {name.lstrip('_')} on every rank, got {values}; "
                "make it with the same arguments, and load the same state_dict on every rank"
            )
