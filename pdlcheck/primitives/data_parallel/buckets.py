"""Gradient buckets: flat buffers, with a view for each parameter and space for flags."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from pdlcheck.compat.torch.flat import foreach_copy_, foreach_mul_
from pdlcheck.primitives.flat import gradient_dtype

__all__ = ["Bucket", "GradBucket"]

# A parameter fires once in a backward pass, or a few times with a static graph. Backward passes of the bare module are
# never synchronised; this limit keeps them from filling the memory.
FIRED_AT_MOST = 1000

# A gradient of at least this many elements is copied into the buffer at once, while the caches hold it and before the
# next one needs memory. Smaller ones are copied together with the bucket, because one call for each would cost more.
LARGE = 2**14

# The size of a buffer is a multiple of this many elements, so that the pieces of an all-reduce begin at cache lines.
ALIGNED = 64


class Bucket:
    """Parameters of one dtype on one device, their gradients side by side in one buffer.

    The buffer ends with flags, because a separate message for them would cost more than their bytes:

    - one flag for each parameter: 0 unless a rank has a gradient for it;
    - one flag that is 0 unless a rank lacks a gradient;
    - one flag that is 0 unless a rank asks about its hook;
    - one flag that is 0 unless a rank sends gradients;
    - one flag that is 0 unless a rank has a problem.

    In any dtype, a sum of flags is 0 only if every flag was 0.

    Args:
        index: place among the buckets; they are reduced in this order on every rank.
        params: the parameters, in the order in which their gradients are expected.
        dtype: the dtype in which the gradients are summed.
        sizes: number of elements of each gradient that have space in the buffer; None is all.
    """

    def __init__(
        self, index: int, params: Sequence[Parameter], dtype: torch.dtype, sizes: Sequence[int] | None = None
    ) -> None:
        self.index = index
        self.params = list(params)
        sizes = [p.numel() for p in params] if sizes is None else list(sizes)
        total = sum(sizes)
        room = -(-(total + len(sizes) + 4) // ALIGNED) * ALIGNED
        self.whole = torch.zeros(room, dtype=dtype, device=params[0].device)
        self.flat, self.tail = self.whole[:total], self.whole[total : total + len(sizes) + 4]
        self.numbers = torch.view_as_real(self.flat).view(-1) if dtype.is_complex else self.flat  # hooks see pairs
        self.plain_tail = torch.tensor([*[1.0] * len(sizes), 0.0, 0.0, 1.0, 0.0], dtype=dtype, device=self.whole.device)
        pieces = zip(torch.split(self.flat, sizes), params, strict=True)
        self.views = [_view(piece, p) if len(piece) == p.numel() else piece for piece, p in pieces]
        self.is_large = [size >= LARGE for size in sizes]
        self.taken = [False] * len(sizes)
        self.has_taken = False
        self.is_whole = True
        self.ready: deque[Parameter] = deque(maxlen=FIRED_AT_MOST * len(sizes))
        self.early: list[Parameter] = []
        self.expected = len(sizes)
        self.launched_at = 0
        self.grads: list[Tensor | None] = []
        self.pending: torch.futures.Future[Any] | dist.Work | None = None

    def begin(self) -> None:
        """Begin a backward pass. Parameters that fired before count as used, but their gradients are not final."""
        if self.pending is not None:  # an error ended the previous pass
            self.pending.wait()
            self.pending = None
        self.wait_beside()
        self.early = list(self.ready)
        self.ready.clear()
        self.expected = len(self.params)
        self.taken = [False] * len(self.params)
        self.has_taken = False

    def is_complete(self, *, repeats: bool) -> bool:
        """Return whether all expected gradients are final.

        Args:
            repeats: whether a parameter may fire several times, as often as it did before.
        """
        fired = len(self.ready)
        return fired == self.expected and (repeats or len(set(map(id, self.ready))) == fired)

    def take(self, place: int, scale: float, *, as_view: bool) -> None:
        """Copy one final gradient, times ``scale``, into the buffer."""
        param, view = self.params[place], self.views[place]
        grad = param.grad
        if grad is None:
            return  # another hook has removed the gradient
        if grad.shape != view.shape or grad.layout != view.layout:
            return  # the parameter was resized, or its gradient is sparse: fill() raises for it
        if grad is view:
            view.mul_(scale)
        elif grad.dtype != view.dtype:
            view.copy_(grad).mul_(scale)
        else:
            torch.mul(grad, scale, out=view)
            if as_view:
                param.grad = view  # releases the memory of the gradient
        self.taken[place] = self.has_taken = True

    def fill(self, scale: float, *, trouble: bool, empty: bool = False) -> None:
        """Copy the gradients that were not taken, times ``scale``, and the flags into the buffer.

        Args:
            scale: the factor of the gradients.
            trouble: whether this rank has a problem.
            empty: whether this rank has no gradients.
        """
        self.note([None if empty else p.grad for p in self.params], trouble=trouble)
        if self.is_whole and not self.has_taken:
            foreach_copy_(self.views, self._whole_grads())  # copies nothing if the gradient is the view
            if scale != 1:
                self.flat.mul_(scale)
        else:
            self._fill_left(scale, empty=empty)

    def note(self, grads: Sequence[Tensor | None], *, trouble: bool) -> None:
        """Keep the gradients that this rank has, and write their flags into the buffer."""
        self.grads = list(grads)
        self.is_whole = not any(grad is None for grad in self.grads)  # `in` would compare the values of tensors
        self.tail.copy_(self.plain_tail)
        if trouble or not self.is_whole:
            flags = [*(grad is not None for grad in self.grads), not self.is_whole, False, True, trouble]
            self.tail.copy_(torch.tensor(flags))

    def question(self) -> tuple[Tensor, Tensor]:
        """Return the message that a rank sends to ask for a comparison of hooks, and the flags in it.

        The message has the size of the buffer, because a rank without a hook sends its buffer instead.
        """
        asked = torch.zeros_like(self.whole)
        flags = asked[len(self.flat) : len(self.flat) + len(self.tail)]
        flags[-3] = 1
        return asked, flags

    def reduce_beside(self, group: dist.ProcessGroup, divisor: int) -> None:
        """Begin to reduce the values outside the buffer. This class has none."""

    def wait_beside(self) -> None:
        """Wait for the operations that ``reduce_beside`` began."""

    def gives_at_once(self, *, as_view: bool) -> bool:
        """Return whether gradients can be assigned during the reduction of the buffer, because they are its views."""
        return as_view and self.is_whole

    def give(self, used: Sequence[float] | None, *, as_view: bool) -> None:
        """Assign every parameter its reduced gradient.

        Args:
            used: for each parameter, 0 if no rank used it: its gradient then stays None. None means that every
                parameter was used.
            as_view: whether gradients are views of the buffer.
        """
        if self.is_whole and as_view:
            for param, view in zip(self.params, self.views, strict=True):
                param.grad = view
        elif self.is_whole:
            foreach_copy_(self._whole_grads(), self.views)
        else:
            assert used is not None  # this rank lacks a gradient, so the flags were read
            for param, grad, view, somewhere in zip(self.params, self.grads, self.views, used, strict=True):
                if not somewhere:
                    continue
                if as_view:
                    param.grad = view
                elif grad is None:
                    param.grad = torch.empty_like(param, dtype=gradient_dtype(param)).copy_(view)
                else:
                    grad.copy_(view)

    def _whole_grads(self) -> list[Tensor]:
        return [grad for grad in self.grads if grad is not None]

    def _fill_left(self, scale: float, *, empty: bool) -> None:
        left = [i for i, taken in enumerate(self.taken) if empty or not taken]
        held = [(self.views[i], grad) for i in left if (grad := self.grads[i]) is not None]
        if held:
            views = [view for view, _ in held]
            foreach_copy_(views, [grad for _, grad in held])
            if scale != 1:
                foreach_mul_(views, scale)
        for i in left:
            if self.grads[i] is None:
                self.views[i].zero_()


class GradBucket:
    """The bucket that a communication hook receives, with the interface of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, *, is_last: bool) -> None:
        self._bucket, self._is_last, self._buffer = bucket, is_last, bucket.numbers

    def index(self) -> int:
        """Return the place among the buckets, in the order in which they are reduced."""
        return self._bucket.index

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward pass."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return the undivided gradients of this rank side by side; complex ones as pairs, as in torch."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Make ``buffer()`` return another tensor, with the same number of elements."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter, as a view of the buffer."""
        if self._buffer is self._bucket.numbers:
            return list(self._bucket.views)
        paired = self._bucket.flat.is_complex() and not self._buffer.is_complex()
        whole = torch.view_as_complex(self._buffer.view(-1, 2)) if paired else self._buffer
        pieces = torch.split(whole, [p.numel() for p in self._bucket.params])
        return [_view(piece, p) for piece, p in zip(pieces, self._bucket.params, strict=True)]

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of ``gradients()``."""
        return list(self._bucket.params)


def _view(piece: Tensor, param: Tensor) -> Tensor:
    """Return ``piece`` with the shape of ``param``, and with its strides if they fill the memory without gaps."""
    sides = sorted((stride, side) for stride, side in zip(param.stride(), param.shape, strict=True) if side > 1)
    filled = 1
    for stride, side in sides:
        if stride != filled:
            return piece.view(param.shape)
        filled *= side
    return piece.as_strided(param.shape, param.stride())
