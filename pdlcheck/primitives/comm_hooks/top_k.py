"""Top-k compression: only the largest entries travel; the rest is added to the next gradient."""

# No `from __future__ import annotations`: DDP compares the hooks' annotations with the types, not with their names.

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.primitives.arguments import members
from pdlcheck.primitives.comm_hooks.bucket import Bucket
from pdlcheck.primitives.comm_hooks.completion import then_on_device
from pdlcheck.primitives.comm_hooks.residuals import Residuals
from pdlcheck.primitives.flat import sum_dtype

__all__ = ["TopKState", "top_k"]

ALIGNMENT = 16  # bytes, so that a part of a message can be read as numbers of any dtype


class TopKState:
    """The state of :func:`top_k` between steps, separate on each rank.

    Args:
        module: the module that DDP wraps; its parameters have residuals by name.
        ratio: the share of each parameter's entries that travels, above 0 and at most 1; at least one entry travels.
        error_feedback: keep the entries that did not travel and add them to the next gradient. Otherwise they are lost,
            and training follows a different gradient.
        group: the process group of DDP; ``None`` is the default group.

    Raises:
        TypeError: ``module`` is not a module, or has complex parameters.
        ValueError: ``ratio`` is outside (0, 1]; no parameter requires a gradient.
    """

    same_on_every_rank = ("ratio", "error_feedback")

    def __init__(
        self,
        module: nn.Module,
        *,
        ratio: float = 0.01,
        error_feedback: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise ValueError(f"TopKState needs a ratio above 0 and at most 1, got ratio={ratio!r}")
        self.residuals = Residuals("TopKState", module)
        self.ratio = ratio
        self.error_feedback = error_feedback
        self.group = group

    def entries(self, numel: int) -> int:
        """Return how many of ``numel`` entries travel."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def scale_residuals(self, factor: float) -> None:
        """Multiply the residuals by ``factor``: the ratio of the scales when a loss scaler changes its scale."""
        self.residuals.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for this rank's checkpoint: plain values and tensors that ``weights_only=True`` can read."""
        who = members("TopKState", self.group)
        return {"rank": who.rank, "world_size": who.world_size, "residuals": self.residuals.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that this rank saved.

        Raises:
            ValueError: the state was saved on another rank or world size, or for another model.
        """
        self.residuals.require_place(state, self.group)
        self.residuals.load_state_dict(state["residuals"])


def top_k(state: TopKState, bucket: Bucket) -> torch.futures.Future[Tensor]:
    """Return the mean over ranks of each rank's largest entries, taken from its gradient plus its residual.

    For each parameter, each rank sends the entries of largest magnitude and their places, in one all_gather for each
    bucket. All ranks add them in the order of the ranks, so replicas stay equal bit for bit. For each rank and entry,
    the sum of all sent values plus the residual equals the sum of all gradients, up to the round-off of one addition
    for each step. The assignment of parameters to buckets does not matter. float16 and bfloat16 gradients are kept,
    sent and summed in float32, and rounded once.

    A parameter whose gradient is zero on this rank sends nothing and keeps its residual. The reason: if it is zero or
    None on every rank, DDP may drop the result. If the result has a NaN or inf, every rank gets it, so that a loss
    scaler skips the step everywhere. The residuals of this bucket then stay as before the step.

    A rank sends about ``ratio * numel * (itemsize + 4)`` bytes to each other rank; a ring all_reduce takes
    ``2 * numel * itemsize``. So the hook saves bytes if ``ratio * world_size`` is well below 1.

    Args:
        state: made on every rank with the same arguments.
        bucket: the bucket that DDP passes to its hook.

    Returns:
        A future of the bucket's buffer, which then holds the mean.

    Raises:
        TypeError: ``state`` is not a :class:`TopKState`.
        ValueError: the bucket has a parameter that the state's module does not have.

    Example:
        >>> from torch import nn
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> def step():
        ...     ddp = DistributedDataParallel(nn.Linear(4, 1, bias=False))
        ...     ddp.register_comm_hook(TopKState(ddp.module, ratio=0.25), top_k)
        ...     ddp(torch.tensor([[4.0, 3.0, 2.0, 1.0]])).sum().backward()
        ...     first = ddp.module.weight.grad.tolist()
        ...     ddp.zero_grad()
        ...     ddp(torch.tensor([[4.0, 3.0, 2.0, 1.0]])).sum().backward()
        ...     return first, ddp.module.weight.grad.tolist()
        >>> world.run(step, world_size=2)[0]
        ([[4.0, 0.0, 0.0, 0.0]], [[0.0, 6.0, 0.0, 0.0]])

    Source: A. Aji and K. Heafield, "Sparse communication for distributed gradient descent", EMNLP (2017); S. Stich, J.
    Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS (2018).
    """
    if not isinstance(state, TopKState):
        raise TypeError(f"top_k takes a TopKState as its state, got {type(state).__name__}")
    who = members("top_k", state.group)
    buffer, parameters, grads = bucket.buffer(), bucket.parameters(), bucket.gradients()
    dtype = sum_dtype(buffer.dtype)
    values, places, rests = [], [], []
    start = 0
    for parameter, grad in zip(parameters, grads, strict=True):
        before = state.residuals.of(parameter)
        flat = grad.detach().reshape(-1).to(dtype)
        used = torch.linalg.vector_norm(flat) != 0  # true for NaN
        whole = flat + before
        chosen = whole.abs().topk(state.entries(len(whole)), sorted=False).indices
        values.append(torch.where(used, whole[chosen], 0))
        places.append(chosen + start)
        rest = whole.index_fill(0, chosen, 0)
        rests.append((torch.where(used, rest, whole), before))
        start += len(whole)
    sent = torch.cat(values)
    message = _packed(sent, torch.cat(places).to(torch.int32 if start < 2**31 else torch.int64))
    everyone = list(message.new_empty(who.world_size, len(message)))
    work = dist.all_gather(everyone, message, group=state.group, async_op=True)

    def add_up() -> Tensor:
        total = torch.zeros(start, dtype=dtype, device=buffer.device)
        for row in everyone:
            theirs, where = _unpacked(row, sent, start)
            total.index_add_(0, where, theirs)
        total /= who.world_size
        finite = torch.isfinite(total).all()
        if state.error_feedback:
            for parameter, (rest, before) in zip(parameters, rests, strict=True):
                state.residuals.keep(parameter, torch.where(finite, rest, before))
        for grad, mean in zip(grads, torch.split(total, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view(grad.shape))
        return buffer

    used = [*everyone, *grads, *(tensor for pair in rests for tensor in pair)]
    return then_on_device(work, state.group, buffer, add_up, used)


def _packed(values: Tensor, places: Tensor) -> Tensor:
    """Return one message of bytes, padded so that the next message in a buffer can be read as numbers."""
    parts = [values.view(torch.uint8), places.view(torch.uint8)]
    rest = -sum(map(len, parts)) % ALIGNMENT
    return torch.cat([*parts, parts[0].new_zeros(rest)])


def _unpacked(row: Tensor, like: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    dtype = torch.int32 if numel < 2**31 else torch.int64
    cut = like.nbytes
    places = row[cut : cut + len(like) * dtype.itemsize]
    if cut % dtype.itemsize:
        places = places.clone()
    return row[:cut].view(like.dtype), places.view(dtype)
