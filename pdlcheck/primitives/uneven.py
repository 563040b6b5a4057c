"""The all_gather of tensors that differ in shape between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.agreement import exchange, raise_first
from pdlcheck.primitives.arguments import members, require_tensor

__all__ = ["all_gather_uneven"]


def all_gather_uneven(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gather the ``tensor`` of every rank on every rank; shapes and dtypes may differ between ranks.

    ``torch.distributed.all_gather`` needs equal shapes. At the end of an evaluation, ranks hold different numbers of
    predictions, and a rank may hold none.

    The cost is one all_gather of objects with the shapes, and one all_gather in which every rank sends as many bytes as
    the largest tensor has.

    Args:
        tensor: any shape and dtype; contiguous; not modified. The result carries no gradient.
        group: process group; ``None`` is the default group.

    Returns:
        A new tensor for each rank, in the order of the group, with that rank's shape and dtype, on this rank's device.

    Raises:
        TypeError, ValueError: an argument of some rank is wrong: it is no tensor, not dense, not contiguous, or on a
            device that the backend cannot send from. Every rank raises the same error.

    Example:
        >>> world.run(lambda: [one.tolist() for one in all_gather_uneven(torch.arange(dist.get_rank()))], world_size=3)
        [[[], [0], [0, 1]], [[], [0], [0, 1]], [[], [0], [0, 1]]]
    """
    who = members("all_gather_uneven", group)
    problem: Exception | None = None
    mine: tuple[torch.Size, torch.dtype] | None = None
    try:
        require_tensor("all_gather_uneven", tensor, group)
        mine = tensor.shape, tensor.dtype
    except (TypeError, ValueError) as error:
        problem = error
    found = exchange(mine, problem, who.group)
    raise_first(found, problem, who)
    kinds = [one for one in found.values if one is not None]
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
    held = torch.zeros(max(sizes), dtype=torch.uint8, device=tensor.device)
    held[: sizes[who.rank]].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    parts = [torch.empty_like(held) for _ in kinds]
    if len(held):
        dist.all_gather(parts, held, group=group)
    return [part[:size].view(dtype).view(shape) for part, size, (shape, dtype) in zip(parts, sizes, kinds, strict=True)]
