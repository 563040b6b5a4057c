"""Word that a rank cannot take this step as the one before, carried by the messages of one micro-batch."""

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
    """What a rank knows of the others in a step that is to be like the one before.

    Each message of ``microbatch`` has a byte more. Forwards it passes through every rank, and then back: who is about
    to do its first backward pass has heard of all ranks. From then on a rank that has heard the alarm computes nothing,
    and sends zeros in the form that the others still wait for.

    Args:
        microbatch: of the messages that carry it, see :func:`bearer`; None in a step that begins with a header.
        raised: this rank, or one before it on the way, cannot take the step.
    """

    microbatch: int | None = None
    raised: bool = False

    def form(self, form: Form, microbatch: int) -> Form:
        """The form of what is received instead of a message of ``form``."""
        if microbatch != self.microbatch:
            return form
        return Form((((_bytes(form) + 1,), torch.uint8), *form.tensors[1:]), form.packed)

    def seal(self, tensors: Tensors, microbatch: int, form_of: Callable[[], Form], device: torch.device) -> Tensors:
        """What to send instead of ``tensors``, a message of the form that ``form_of`` returns."""
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
        """The message in what was received; hears the alarm."""
        if microbatch != self.microbatch:
            return tensors
        sealed, *others = tensors
        self.raised = self.raised or bool(sealed[-1])
        firsts = (sealed[:-1].view(dtype).view(shape) for shape, dtype in form_of().tensors[:1])
        return *firsts, *others


def bearer(schedule: Schedule) -> int | None:
    """The micro-batch of the first backward pass of every rank; None where they are of several."""
    firsts = {next(cell.microbatch for cell in row if cell is not None and cell.kind == "B") for row in schedule.rows}
    return firsts.pop() if len(firsts) == 1 else None


def _bytes(form: Form) -> int:
    """Of the first tensor, which the byte is added to."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in form.tensors[:1])
