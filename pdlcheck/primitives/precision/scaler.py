"""A loss scaler whose ranks skip steps together and keep one scale."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pdlcheck.compat.torch.optim import overflows_of
from pdlcheck.primitives.arguments import Members, members
from pdlcheck.primitives.precision.clip import clip_grad_norm
from pdlcheck.primitives.precision.rows import Rows, gather_rows, raise_everywhere

__all__ = ["DistributedGradScaler"]

SELF = "DistributedGradScaler"


class DistributedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for ranks with different gradients: if a gradient of one rank overflows, no rank steps.

    torch's scaler checks only the gradients of its own rank. That is enough if gradients are synchronised before, as by
    DDP: every rank then detects the overflow. It fails if the ranks hold different gradients: pipeline stages, ZeRO,
    sharded parameters, or gradients that are synchronised after :meth:`unscale_`. Then some ranks step and others do
    not, and their scales differ from then on.

    The cost is one all_gather of 64 bytes from each rank for each :meth:`unscale_`, called directly or by :meth:`step`.
    The message also carries the scale. So scales that already differ (a checkpoint loaded on one rank) cause an error
    instead of a wrong gradient. On a GPU the host waits for the message. A rank without any gradient takes part like
    the others, and so does one that never called :meth:`scale` because a later stage computes the loss.

    ``state_dict()`` is that of torch's scaler, numbers only; save it once and load it on every rank.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch. Use ``enabled=False``
            for bfloat16; such a scaler does nothing and sends nothing.
        group: the ranks that step together; ``None`` is the default group.

    Raises:
        ValueError: from :meth:`unscale_` and :meth:`step`, on every rank: gradients are float16 (their parameters
            should be float32, see :class:`MasterWeights`), the ranks' scales or factors differ, or no loss was scaled
            on any rank.
        RuntimeError: ``unscale_`` is called twice between two calls of ``update()``.

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
        self._scaled = False  # whether this rank has scaled a loss
        self._overflow: dict[int, bool] = {}  # by unscaled optimizer: whether a gradient of any rank overflowed

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs``, a tensor or several, times the scale."""
        self._scaled = True
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, and exchange whether those of any rank overflowed."""
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
        found = overflows_of(self, optimizer)
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
        """Unscale the gradients of ``optimizer`` if necessary, then clip them by the norm of all ranks.

        If a gradient overflowed, nothing is clipped, because the step is skipped; the norm is then inf.

        Args:
            optimizer: the optimizer whose gradients are clipped.
            max_norm: above 0.
            **keywords: passed to :func:`clip_grad_norm`.

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
        """Call ``optimizer.step()`` on every rank, or on none if a gradient of any rank overflowed."""
        if self.is_enabled() and "closure" not in kwargs and id(optimizer) not in self._overflow:
            self.unscale_(optimizer)  # before torch does: torch lets fused optimizers check only their own rank
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the scale of the next step from the overflows of all ranks, so that it is the same on each rank."""
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
