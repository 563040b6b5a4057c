"""How far rounding alone leads a training astray: measured, by a start whose weights are rounded otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pdlcheck.checks.state import State, state_of

__all__ = ["Rounding", "or_zeros"]

_TRIES = 4
# In trainings of small language models with SGD and Adam, in bfloat16 and float32, right ones were off by up to 1.5
# times as much as the farthest of three starts with other last bits, wrong ones by 14 and more. The steps of Adam may
# change their signs with few of a tensor's elements: so that one of the starts shows it, three bits differ.
_BITS = 3
_TIMES = 2.0
_NOISE = 0.5  # of the way: where rounding leads a tensor so far, its way says nothing


class Rounding:
    """The ways that a training takes from starts that differ in the last bits of a dtype; run when first asked for.

    Adam divides by the size of a gradient: where that is zero but for rounding, as that of the bias of the keys in
    attention, or of single elements of any weight, the step is as long as others, in a direction of chance.

    Args:
        train: from a start to what the model holds on one rank in the end.
        start: the model that it began with.
        end: what ``train(start)`` gave.
        dtype: the precision whose last bits differ.
    """

    def __init__(self, train: Callable[[nn.Module], State], start: nn.Module, end: State, dtype: torch.dtype) -> None:
        self._train = train
        self._start = start
        self._end = end
        self._eps = 2 ** (_BITS - 1) * torch.finfo(dtype).eps
        self._astray: dict[str, float] | None = None

    def explains(self, name: str, off: float, way: float) -> bool:
        """Whether a tensor that went ``way``, a norm, and is ``off`` by another may be so by rounding."""
        astray = self.astray(name)
        return astray > 0 and (off <= _TIMES * astray or astray >= _NOISE * way > 0)

    def astray(self, name: str) -> float:
        """Norm of the difference between the ways of a tensor, the largest of several starts."""
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
    """What a tensor begins with; zeros where it is made in a training, or has another shape there."""
    return torch.zeros_like(like) if begin is None or begin.shape != like.shape else begin
