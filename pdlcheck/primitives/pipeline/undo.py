"""The undo of a failed step: its passes change neither random numbers nor running statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pdlcheck.compat.torch.modules import own_buffers
from pdlcheck.compat.torch.tensors import in_place_version

__all__ = ["Undo"]

Place = tuple[nn.Module, str]


@dataclass
class Undo:
    """The state of this process's layers at the last :meth:`note`, and its restoration.

    Each step copies only the buffers that passes write. They are detected in steps that copy all buffers, and later by
    a changed version. Versions alone are not enough: batch norm writes its statistics without counting a version.

    Args:
        modules: the layers, and the loss if it is a module.
        device: the device of the layers.
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
        """Record the current parts of the modules; return which of them are in training mode."""
        self._parts = [*self.modules.modules()]
        return bytes(part.training for part in self._parts)

    def note(self, *, everything: bool) -> None:
        """Copy the state before the first pass of a step, after :meth:`look`.

        Args:
            everything: copy all buffers, for :meth:`learn`.
        """
        self._random = torch.get_rng_state()
        if self.device.type == "cuda":
            self._random_cuda = torch.cuda.get_rng_state(self.device)
        self._kept, before, self._versions = {}, self._versions, {}
        for part in self._parts:
            for name, buffer in own_buffers(part).items():
                place = part, name
                if buffer is not None and not everything and place not in self._written:
                    count = 0 if buffer.is_inference() else in_place_version(buffer)
                    self._versions[place] = version = id(buffer), count
                    if before.get(place, version) == version:
                        continue
                    self._written.add(place)
                self._kept[place] = buffer, None if buffer is None else buffer.detach().clone()

    def learn(self) -> None:
        """Record which buffers the step has written."""
        for place, (buffer, value) in self._kept.items():
            if place not in self._written and not _is_still(place, buffer, value):
                self._written.add(place)

    def go_back(self) -> None:
        """Restore the state of the last :meth:`note`."""
        if self._random is not None:
            torch.set_rng_state(self._random)
        if self._random_cuda is not None:
            torch.cuda.set_rng_state(self._random_cuda, self.device)
        for place, (buffer, value) in self._kept.items():
            if not _is_still(place, buffer, value):
                part, name = place
                own_buffers(part)[name] = buffer
                if buffer is not None and value is not None:
                    with torch.no_grad():
                        buffer.copy_(value)


def _is_still(place: Place, buffer: Tensor | None, value: Tensor | None) -> bool:
    """Return whether ``buffer`` is at its place and has its ``value``."""
    part, name = place
    if own_buffers(part).get(name) is not buffer:
        return False
    if buffer is None or value is None:
        return True
    try:
        return torch.equal(buffer, value)
    except RuntimeError:  # torch cannot compare some tensors, such as sparse ones
        return False
