"""Passes of a step that comes to nothing leave no trace: neither in random numbers nor in running statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["Undo"]


@dataclass
class Undo:
    """The way back to how the layers of this process were when :meth:`note` was called.

    Only buffers that passes write are copied in each step; which they are is learned in steps that copy all of them.
    Versions do not tell: batch norm writes its statistics without counting.

    Args:
        module: the layers.
        device: where they are.
    """

    module: nn.Module
    device: torch.device
    _random: Tensor | None = None
    _random_cuda: Tensor | None = None
    _written: set[tuple[int, str]] = field(default_factory=set)
    _kept: dict[tuple[int, str], tuple[nn.Module, Tensor, Tensor]] = field(default_factory=dict)

    def note(self, *, everything: bool) -> None:
        """Note how it is before the first pass of a step.

        Args:
            everything: copy all buffers, for :meth:`learn`.
        """
        self._random = torch.get_rng_state()
        if self.device.type == "cuda":
            self._random_cuda = torch.cuda.get_rng_state(self.device)
        self._kept = {
            (number, name): (module, buffer, buffer.detach().clone())
            for number, module in enumerate(self.module.modules())
            for name, buffer in module._buffers.items()
            if buffer is not None and (everything or (number, name) in self._written)
        }

    def learn(self) -> None:
        """See which buffers the step has written."""
        for key, (module, buffer, value) in self._kept.items():
            if key not in self._written and not (module._buffers.get(key[1]) is buffer and torch.equal(buffer, value)):
                self._written.add(key)

    def go_back(self) -> None:
        """Make it so again."""
        if self._random is not None:
            torch.set_rng_state(self._random)
        if self._random_cuda is not None:
            torch.cuda.set_rng_state(self._random_cuda, self.device)
        for (_, name), (module, buffer, value) in self._kept.items():
            module._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(value)
