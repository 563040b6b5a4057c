"""Passes of a step that comes to nothing leave no trace: neither in random numbers nor in running statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["Undo"]

Place = tuple[nn.Module, str]


@dataclass
class Undo:
    """The way back to how the layers of this process were when :meth:`note` was called.

    Only buffers that passes write are copied in each step; which they are is learned in steps that copy all of them,
    and later, where the version of one tells. That is not enough: batch norm writes its statistics without counting.

    Args:
        modules: the layers, and the loss if that is a module.
        device: where they are.
    """

    modules: nn.ModuleList
    device: torch.device
    _parts: list[nn.Module] = field(default_factory=list)
    _random: Tensor | None = None
    _random_cuda: Tensor | None = None
    _written: set[Place] = field(default_factory=set)
    _kept: dict[Place, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    _versions: dict[Place, tuple[int, int]] = field(default_factory=dict)

    def look(self) -> bytes:
        """See which parts there are; returns which of them are in training mode."""
        self._parts = [*self.modules.modules()]
        return bytes(part.training for part in self._parts)

    def note(self, *, everything: bool) -> None:
        """Note how it is before the first pass of a step, after :meth:`look`.

        Args:
            everything: copy all buffers, for :meth:`learn`.
        """
        self._random = torch.get_rng_state()
        if self.device.type == "cuda":
            self._random_cuda = torch.cuda.get_rng_state(self.device)
        self._kept, before, self._versions = {}, self._versions, {}
        for part in self._parts:
            for name, buffer in part._buffers.items():
                place = part, name
                if buffer is not None and not everything and place not in self._written:
                    self._versions[place] = version = id(buffer), 0 if buffer.is_inference() else buffer._version
                    if before.get(place, version) == version:
                        continue
                    self._written.add(place)
                self._kept[place] = buffer, None if buffer is None else buffer.detach().clone()

    def learn(self) -> None:
        """See which buffers the step has written."""
        for place, (buffer, value) in self._kept.items():
            if place not in self._written and not _is_still(place, buffer, value):
                self._written.add(place)

    def go_back(self) -> None:
        """Make it so again."""
        if self._random is not None:
            torch.set_rng_state(self._random)
        if self._random_cuda is not None:
            torch.cuda.set_rng_state(self._random_cuda, self.device)
        for place, (buffer, value) in self._kept.items():
            if not _is_still(place, buffer, value):
                part, name = place
                part._buffers[name] = buffer
                if buffer is not None and value is not None:
                    with torch.no_grad():
                        buffer.copy_(value)


def _is_still(place: Place, buffer: Tensor | None, value: Tensor | None) -> bool:
    """Whether ``buffer`` is at its place, and has its ``value``."""
    part, name = place
    if part._buffers.get(name) is not buffer:
        return False
    if buffer is None or value is None:
        return True
    try:
        return torch.equal(buffer, value)
    except RuntimeError:  # torch does not compare sparse ones, say
        return False
