"""A parameter that several stages share, such as the embedding of the first and the last stage, as several copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.primitives.flat import gradient_dtype

__all__ = ["Tie", "share_tied_values", "sum_tied_gradients"]


@dataclass(frozen=True)
class Tie:
    """One tied parameter.

    Args:
        name: its first name in the model.
        copies: the copies in this process, one or all of them, by the place of their rank in the group.
        places: the places of all ranks that have a copy, in rising order.
    """

    name: str
    copies: dict[int, nn.Parameter]
    places: tuple[int, ...]


def share_tied_values(ties: Sequence[Tie], group: dist.ProcessGroup | None) -> None:
    """Set every copy to the value of the first one, so that copies start equal."""
    for tie in ties:
        first = tie.places[0]
        with torch.no_grad():
            if group is None:
                for place in tie.places[1:]:
                    tie.copies[place].copy_(tie.copies[first])
                continue
            ((own, copy),) = tie.copies.items()
            value = copy.detach().contiguous()
            others = tie.places[1:] if own == first else (first,)
            kind = dist.isend if own == first else dist.irecv
            _exchange([dist.P2POp(kind, value, group=group, group_peer=other) for other in others])
            if own != first and value.data_ptr() != copy.data_ptr():
                copy.copy_(value)


def sum_tied_gradients(ties: Sequence[Tie], group: dist.ProcessGroup | None) -> None:
    """Replace the gradient of every copy by the sum over all copies, added in the same order: equal bit for bit.

    Each rank with a copy sends its part to the others: two messages for the usual pair of stages. A flag at the end of
    a message states whether the rank has a gradient. If no copy has one, all keep None.
    """
    ties = [tie for tie in ties if next(iter(tie.copies.values())).requires_grad]
    parts: list[dict[int, Tensor]] = []
    receives: list[dist.P2POp] = []
    sends: list[dist.P2POp] = []
    for tie in ties:
        held = {place: _flagged(copy) for place, copy in tie.copies.items()}
        if group is not None:
            ((own, part),) = list(held.items())
            for other in tie.places:
                if other != own:
                    held[other] = torch.empty_like(part)
                    receives.append(dist.P2POp(dist.irecv, held[other], group=group, group_peer=other))
                    sends.append(dist.P2POp(dist.isend, part, group=group, group_peer=other))
        parts.append(held)
    _exchange([*receives, *sends])  # receives first, so that both directions of a link are used at once
    for tie, held in zip(ties, parts, strict=True):
        for copy in tie.copies.values():
            total = torch.zeros(copy.numel() + 1, dtype=gradient_dtype(copy), device=copy.device)
            for place in tie.places:
                total += held[place].to(copy.device)
            copy.grad = total[:-1].view(copy.shape) if total[-1] else None


def _flagged(copy: nn.Parameter) -> Tensor:
    """Return the gradient, flat, followed by 1; zeros if there is no gradient."""
    dtype = gradient_dtype(copy)
    if copy.grad is None:
        return torch.zeros(copy.numel() + 1, dtype=dtype, device=copy.device)
    grad = copy.grad.to_dense().to(dtype)  # an embedding may have a sparse gradient
    return torch.cat([grad.flatten(), grad.new_ones(1)])


def _exchange(ops: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
