"""Activations and gradients between ranks: posted in the order of the grid, waited for when they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.pipeline.cells import Cell

__all__ = ["Form", "Messages", "form_of"]

# Backends whose sends and receives between two ranks do not wait for each other; the last is pdlcheck.worlds.mpi's.
BOTH_WAYS = ("gloo", "mpi", "pdlcheck_mpi")


@dataclass(frozen=True)
class Form:
    """The form of a message; ranks agree on it before the first message is sent.

    Args:
        tensors: shape and dtype of each.
        packed: whether the stage returns a tuple, even of one tensor.
        flagged: whether some of the tensors may get no gradient. The gradient message then ends with one flag for each
            tensor.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    packed: bool
    flagged: bool = field(default=False, compare=False)

    def gradients(self) -> Form:
        """Return the form of the gradient message. Integers have no gradient."""
        floating = tuple(one for one in self.tensors if one[1].is_floating_point or one[1].is_complex)
        return Form((*floating, ((len(floating),), torch.uint8)) if self.flagged else floating, True)

    def pack(self, gradients: Sequence[Tensor | None], device: torch.device) -> tuple[Tensor, ...]:
        """Return the gradient message; zeros replace None."""
        shapes = self.gradients().tensors[: len(gradients)]
        filled = tuple(
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype) in zip(gradients, shapes, strict=True)
        )
        flags = [gradient is not None for gradient in gradients]
        return (*filled, torch.tensor(flags, dtype=torch.uint8, device=device)) if self.flagged else filled

    def unpack(self, message: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients in a gradient message."""
        if not self.flagged:
            return list(message)
        *filled, flags = message
        return [one if flag else None for one, flag in zip(filled, flags.tolist(), strict=True)]

    def __str__(self) -> str:
        return ", ".join(f"{str(dtype).removeprefix('torch.')} {shape}" for shape, dtype in self.tensors) or "nothing"


def form_of(tensors: Sequence[Tensor], packed: bool) -> Form:
    """Return the form of these tensors."""
    return Form(tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors), packed)


class Messages:
    """The sends and receives of one rank.

    Args:
        group: the ranks of the pipeline.
        device: the device of received tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._inbox: dict[Cell, tuple[tuple[Tensor, ...], list[dist.Work]]] = {}
        self._sent: deque[tuple[list[dist.Work], Sequence[Tensor]]] = deque()
        self._most = max(8, 2 * dist.get_world_size(group))
        # With these backends, receives are posted before the pass of their turn, so that messages arrive during it.
        self.ahead = dist.get_backend(group) in BOTH_WAYS

    def post(self, tensors: Sequence[Tensor], target: int | None, receives: Sequence[tuple[Cell, int, Form]]) -> None:
        """Post the send of ``tensors`` to the place ``target``, and receives, as one batch. Do not wait for them."""
        ops: list[dist.P2POp] = []  # receives first, so that both directions of a link are used at once
        group = self._group
        starts = []
        for _, source, form in receives:
            buffers = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in form.tensors)
            starts.append((buffers, len(ops)))
            full = [buffer for buffer in buffers if buffer.numel()]
            ops += [dist.P2POp(dist.irecv, buffer, group=group, group_peer=source) for buffer in full]
        received = len(ops)
        # A tensor without elements is not sent, because its form is known.
        held = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors if tensor.numel()]
        if target is not None:
            ops += [dist.P2POp(dist.isend, tensor, group=group, group_peer=target) for tensor in held]
        works = dist.batch_isend_irecv(ops) if ops else []
        batched = len(works) != len(ops)  # nccl returns one work for all
        for number, ((cell, _, _), (buffers, start)) in enumerate(zip(receives, starts, strict=True)):
            end = starts[number + 1][1] if number + 1 < len(starts) else received
            self._inbox[cell] = buffers, works if batched else works[start:end]
        if len(ops) > received:
            self._sent.append((works if batched else works[received:], held))
        while len(self._sent) > self._most:
            self._wait_for_oldest()

    def take(self, cell: Cell) -> tuple[Tensor, ...]:
        """Wait for the message that ``cell`` reads, and return it."""
        buffers, works = self._inbox.pop(cell)
        for work in works:
            work.wait()
        return buffers

    def finish(self) -> None:
        """Wait until everything has been sent."""
        while self._sent:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        works, _ = self._sent.popleft()
        for work in works:
            work.wait()
