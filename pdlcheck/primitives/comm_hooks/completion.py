"""The computation of a hook on the result of an operation, after the operation completes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.compat.torch.groups import backend_name

__all__ = ["then_on_device"]


def then_on_device(
    work: Any, group: dist.ProcessGroup | None, buffer: Tensor, finish: Callable[[], Tensor], used: Sequence[Tensor]
) -> torch.futures.Future[Tensor]:
    """Return a future of the result of ``finish``, which is called when ``work`` is done.

    ``finish`` runs in the thread that reports the completion. On a CUDA device, that report may come before the device
    has the result, and memory may be reused before the device has read it. With nccl, ``finish`` runs in a stream of
    its own, beside that of the backward pass. With other backends it runs in the caller's stream, which they block
    anyway (pytorch/pytorch#155714).

    Args:
        work: an operation of ``group``.
        group: None for the default group.
        buffer: the tensor that names the device.
        finish: computes from tensors on the device.
        used: the tensors that ``finish`` reads and that have no other owner.

    Raises:
        RuntimeError: from the future: the error of the operation.
    """
    done: torch.futures.Future[Any] = work.get_future()
    if not buffer.is_cuda:
        return done.then(lambda told: (told.value(), finish())[1])
    members: Any = dist.group.WORLD if group is None else group
    own = torch.cuda.current_stream(buffer.device)
    behind = backend_name(members, buffer.device) == "nccl"

    def follow(told: torch.futures.Future[Any]) -> Tensor:
        told.value()
        if behind:
            for tensor in used:
                tensor.record_stream(torch.cuda.current_stream(buffer.device))
            return finish()
        with torch.cuda.stream(own):
            work.synchronize()
            return finish()

    return done.then(follow)
