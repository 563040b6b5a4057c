"""The effect of rounding on a training, measured with starts whose weights are rounded differently."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pdlcheck.checks.state import State, state_of

__all__ = ["Rounding", "or_zeros"]

_TRIES = 4
# Measured with trainings of small language models with SGD and Adam, in bfloat16 and float32. Right trainings were off
# by up to 1.5 times as much as the farthest of three starts with other last bits, and wrong ones by 14 times and more.
# The steps of Adam may change their signs with few of a tensor's elements. Three bits differ, so that one of the starts
# shows such a change.
_BITS = 3
_TIMES = 2.0
_NOISE = 0.5  # of the way: a tensor that rounding moves so far cannot be compared


class Rounding:
    """The ways of a training from starts that differ in the last bits of a dtype, computed on first use.

    Adam divides by the size of a gradient. If the gradient is zero except for rounding, the step is as long as others,
    in a random direction. Examples are the bias of the keys in attention, or single elements of any weight.

    Args:
        train: maps a start to the final state of one rank.
        start: the model at the start.
        end: the result of ``train(start)``.
        dtype: the precision whose last bits differ.
    """

    def __init__(self, train: Callable[[nn.Module], State], start: nn.Module, end: State, dtype: torch.dtype) -> None:
        """Store the arguments. No training runs here."""
        self._train = train
        self._start = start
        self._end = end
        self._eps = 2 ** (_BITS - 1) * torch.finfo(dtype).eps
        self._astray: dict[str, float] | None = None

    def explains(self, name: str, off: float, way: float) -> bool:
        """Return whether rounding may explain a tensor that is off.

        Args:
            name: of the tensor.
            off: the norm of its error.
            way: the norm of its right way.
        """
        astray = self.astray(name)
        return astray > 0 and (off <= _TIMES * astray or astray >= _NOISE * way > 0)

    def astray(self, name: str) -> float:
        """Return the norm of the difference between the ways of a tensor, the largest of several starts."""
        if self._astray is None:
            self._astray = self._measured()
        return self._astray.get(name, 0.0)

    def _measured(self) -> dict[str, float]:
        begin, astray = state_of(self._start), dict[str, float]()
        for seed in range(_TRIES):
            start = self._rounded(seed)
            other, end = state_of(start), self._train(start)
            for name, held in self._end.items():
                ended = end.get(name)
                if held is not None and ended is not None and held.shape == ended.shape and held.is_floating_point():
                    off = ended - held - (or_zeros(other.get(name), held) - or_zeros(begin.get(name), held))
                    astray[name] = max(astray.get(name, 0.0), float(off.norm()))
        return astray

    def _rounded(self, seed: int) -> nn.Module:
        model, draws = copy.deepcopy(self._start), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    share = 2 * torch.rand(tensor.shape, generator=draws, dtype=tensor.dtype) - 1
                    tensor.mul_(1 + self._eps * share.to(tensor.device))
        return model


def or_zeros(begin: Tensor | None, like: Tensor) -> Tensor:
    """Return the start of a tensor, or zeros if the training makes it or changes its shape."""
    return torch.zeros_like(like) if begin is None or begin.shape != like.shape else begin
