"""Which gradients travel together: flat buffers with a view for each parameter, and room for what ranks must agree on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["Bucket", "GradBucket", "assign_buckets"]

# A parameter fires once in a backward pass, or a few times with a static graph. Passes that nobody synchronises, of the
# bare module, must not fill the memory.
FIRED_AT_MOST = 1000


class Bucket:
    """Parameters of one dtype on one device, their gradients side by side in one buffer.

    The buffer ends with flags, because a message of their own would cost more than their bytes: one for each parameter
    (a rank has a gradient for it), one that is 0 unless a rank lacks a gradient, one that is 0 unless a rank is in
    trouble. Sums of flags are 0 only where every flag was, in any dtype.

    Args:
        index: place among the buckets; they are reduced in this order on every rank.
        params: in the order in which their gradients are expected.
        dtype: in which the gradients are summed.
    """

    def __init__(self, index: int, params: Sequence[Parameter], dtype: torch.dtype) -> None:
        self.index = index
        self.params = list(params)
        sizes = [p.numel() for p in params]
        self.whole = torch.zeros(sum(sizes) + len(sizes) + 2, dtype=dtype, device=params[0].device)
        self.flat, self.used, self.status = self.whole.split([sum(sizes), len(sizes), 2])
        self.views = [_view(piece, p) for piece, p in zip(self.flat.split(sizes), params, strict=True)]
        self.is_coarse = sum(sizes) > 2**14 * len(sizes)
        self.ready: deque[Parameter] = deque(maxlen=FIRED_AT_MOST * len(sizes))
        self.early: list[Parameter] = []
        self.expected = len(sizes)
        self.launched_at = 0
        self.grads: list[Tensor | None] = []
        self.pending: torch.futures.Future[Tensor] | torch.distributed.Work | None = None

    def begin(self) -> None:
        """A backward pass begins; what fired before counts as used, but not as final."""
        if self.pending is not None:  # a pass that an error ended
            self.pending.wait()
            self.pending = None
        self.early = list(self.ready)
        self.ready.clear()
        self.expected = len(self.params)

    def is_complete(self, *, repeats: bool) -> bool:
        """All gradients that are expected are final. ``repeats``: a parameter fires as often as it did before."""
        fired = len(self.ready)
        return fired == self.expected and (repeats or len(set(map(id, self.ready))) == fired)

    def fill(self, scale: float, *, trouble: bool, empty: bool = False) -> None:
        """Bring the gradients into the buffer, times ``scale``, and the flags. ``empty``: this rank has none."""
        self.grads = [None if empty else p.grad for p in self.params]
        lacking = None in self.grads
        if self.is_coarse and not lacking:
            for grad, view in zip(self.grads, self.views, strict=True):
                assert grad is not None  # not lacking
                if grad is view:
                    view.mul_(scale)
                else:
                    torch.mul(grad, scale, out=view) if grad.dtype == view.dtype else view.copy_(grad).mul_(scale)
        else:
            moved = [(g, v) for g, v in zip(self.grads, self.views, strict=True) if g is not v]
            held = [(g, v) for g, v in moved if g is not None]
            if held:
                torch._foreach_copy_([v for _, v in held], [g for g, _ in held])
            for grad, view in moved:
                if grad is None:
                    view.zero_()
            if scale != 1:
                self.flat.mul_(scale)
        self.used.fill_(1)
        if lacking:
            self.used.copy_(torch.tensor([g is not None for g in self.grads]))
        self.status.zero_()
        if lacking or trouble:
            self.status.copy_(torch.tensor([lacking, trouble]))

    def give(self, used: Sequence[float] | None, *, as_view: bool) -> None:
        """Give every parameter its reduced gradient; None stays None where no rank ``used`` it (None: all did)."""
        if used is None and not as_view:
            torch._foreach_copy_(self.grads, self.views)
            return
        flags = used or [1.0] * len(self.params)
        for param, grad, view, somewhere in zip(self.params, self.grads, self.views, flags, strict=True):
            if grad is view or not somewhere:
                continue
            if as_view:
                param.grad = view
            elif grad is None:
                param.grad = torch.empty_like(param).copy_(view)
            else:
                grad.copy_(view)


class GradBucket:
    """What a communication hook sees of a bucket: the interface of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, *, is_last: bool) -> None:
        self._bucket, self._is_last, self._buffer = bucket, is_last, bucket.flat

    def index(self) -> int:
        """Place among the buckets, in the order in which they are reduced."""
        return self._bucket.index

    def is_last(self) -> bool:
        """True for the last bucket of the backward pass."""
        return self._is_last

    def buffer(self) -> Tensor:
        """The gradients of this rank side by side, not divided by anything."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Make ``buffer()`` return another tensor, of as many elements."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The gradient of each parameter, a view of the buffer."""
        if self._buffer is self._bucket.flat:
            return list(self._bucket.views)
        pieces = self._buffer.split([p.numel() for p in self._bucket.params])
        return [_view(piece, p) for piece, p in zip(pieces, self._bucket.params, strict=True)]

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of ``gradients()``."""
        return list(self._bucket.params)


def assign_buckets(
    params: Sequence[Parameter], first_bytes: int, cap_bytes: int, reduce_dtype: torch.dtype | None = None
) -> list[Bucket]:
    """Buckets of at least ``cap_bytes`` (the first of a kind ``first_bytes``), as their last parameter was.

    Args:
        params: in the order in which their gradients become ready.
        first_bytes: the first bucket is small, so that communication begins early.
        cap_bytes: a bucket is closed when it holds this much.
        reduce_dtype: dtype of the buffers for float16 and bfloat16; None is their own.
    """
    kinds: dict[tuple[torch.dtype, torch.device], tuple[int, list[int]]] = {}
    closed: list[tuple[torch.dtype, list[int]]] = []
    begun = set()
    for place, param in enumerate(params):
        low = reduce_dtype is not None and param.dtype in (torch.float16, torch.bfloat16)
        kind = reduce_dtype if low and reduce_dtype is not None else param.dtype, param.device
        filled, places = kinds.setdefault(kind, (0, []))
        places.append(place)
        filled += param.numel() * kind[0].itemsize
        kinds[kind] = filled, places
        if filled >= (cap_bytes if kind in begun else first_bytes):
            begun.add(kind)
            closed.append((kind[0], kinds.pop(kind)[1]))
    closed += [(kind[0], places) for kind, (_, places) in kinds.items()]
    closed.sort(key=lambda entry: entry[1][-1])
    return [Bucket(i, [params[p] for p in places], dtype) for i, (dtype, places) in enumerate(closed)]


def _view(piece: Tensor, param: Tensor) -> Tensor:
    """``piece`` with the shape of ``param``, and its strides where they fill the memory without gaps."""
    sides = sorted((stride, side) for stride, side in zip(param.stride(), param.shape, strict=True) if side > 1)
    filled = 1
    for stride, side in sides:
        if stride != filled:
            return piece.view(param.shape)
        filled *= side
    return piece.as_strided(param.shape, param.stride())
