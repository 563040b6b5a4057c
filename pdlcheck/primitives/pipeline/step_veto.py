"""The alarm that a rank cannot repeat the previous step, carried by the messages of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from pdlcheck.primitives.pipeline.cells import Schedule
from pdlcheck.primitives.pipeline.messages import Form
from pdlcheck.primitives.pipeline.stage import Tensors

__all__ = ["Alarm", "bearer"]


@dataclass
class Alarm:
    """The state of the alarm on one rank, in a step that is tried as a repetition of the previous one.

    Each message of ``microbatch`` has one more byte. The byte passes through every rank in the forward passes, and then
    back. So before its first backward pass, a rank has the answer of all ranks. A rank that has received the alarm
    computes nothing more. It sends zeros in the form that the other ranks still wait for.

    Args:
        microbatch: the micro-batch whose messages carry the alarm, see :func:`bearer`; None in a step that begins with
            a header.
        raised: whether this rank, or one before it on the way, cannot take the step.
    """

    microbatch: int | None = None
    raised: bool = False

    def form(self, form: Form, microbatch: int) -> Form:
        """Return the form in which a message of ``form`` is received."""
        if microbatch != self.microbatch:
            return form
        return Form((((_bytes(form) + 1,), torch.uint8), *form.tensors[1:]), form.packed)

    def seal(self, tensors: Tensors, microbatch: int, form_of: Callable[[], Form], device: torch.device) -> Tensors:
        """Return the message to send in place of ``tensors``, which has the form that ``form_of`` returns."""
        if not self.raised and microbatch != self.microbatch:
            return tensors
        form = form_of()
        if self.raised:
            tensors = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in form.tensors)
        if microbatch != self.microbatch:
            return tensors
        size = _bytes(form)
        sealed = torch.empty(size + 1, dtype=torch.uint8, device=device)
        for tensor in tensors[:1]:
            sealed[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        sealed[size] = self.raised
        return sealed, *tensors[1:]

    def open(self, tensors: Tensors, microbatch: int, form_of: Callable[[], Form]) -> Tensors:
        """Return the original message of a received one, and record its alarm."""
        if microbatch != self.microbatch:
            return tensors
        sealed, *others = tensors
        self.raised = self.raised or bool(sealed[-1])
        firsts = (sealed[:-1].view(dtype).view(shape) for shape, dtype in form_of().tensors[:1])
        return *firsts, *others


def bearer(schedule: Schedule) -> int | None:
    """Return the micro-batch of the first backward pass of every rank; None if the ranks begin with different ones."""
    firsts = {next(cell.microbatch for cell in row if cell is not None and cell.kind == "B") for row in schedule.rows}
    return firsts.pop() if len(firsts) == 1 else None


def _bytes(form: Form) -> int:
    """Return the bytes of the first tensor; the alarm's byte follows it."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in form.tensors[:1])
