"""What a hook does with the result of an operation, when that is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["then_on_device"]


def then_on_device(
    work: Any, group: dist.ProcessGroup | None, buffer: Tensor, finish: Callable[[], Tensor], used: Sequence[Tensor]
) -> torch.futures.Future[Tensor]:
    """A future of what ``finish`` returns, which is called once ``work`` is done, in whatever thread says so.

    On a CUDA device the host may be told before the device has the result, and memory may be given to others before the
    device has read it. Behind nccl ``finish`` goes on in a stream of its own, beside that of the backward pass; behind
    other backends in the stream of the caller, which they hold up anyway (pytorch/pytorch#155714).

    Args:
        work: an operation of ``group``.
        group: None for the default group.
        buffer: on the device.
        finish: computes from tensors on the device.
        used: the tensors that ``finish`` reads and that nothing else keeps.

    Raises:
        RuntimeError: from the future, what the operation raised.
    """
    done: torch.futures.Future[Any] = work.get_future()
    if not buffer.is_cuda:
        return done.then(lambda told: (told.value(), finish())[1])
    members: Any = dist.group.WORLD if group is None else group
    own = torch.cuda.current_stream(buffer.device)
    behind = members._get_backend(buffer.device).name() == "nccl"

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
