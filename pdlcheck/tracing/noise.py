"""Noise of the size of rounding, for the run that estimates how far rounding alone moves each tensor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Noise"]


class Noise:
    """A stream of noise of its own: the program's random numbers stay as they are.

    Args:
        seed: the seed of the stream.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def added(self, tensor: Tensor) -> Tensor:
        """Return ``tensor + eps / 2 * max(|tensor|, rms) * x``, with x normal and eps of the dtype.

        The root mean square is there for sums whose terms are larger than their result.
        """
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        held = tensor.detach()
        wide = torch.promote_types(held.dtype, torch.float32)
        size = torch.maximum(held.abs().to(wide), held.to(wide).square().mean().sqrt())
        drawn = torch.randn(held.shape, dtype=wide, device=held.device, generator=self._stream(held.device))
        half = torch.finfo(held.dtype).eps / 2  # the largest error of one rounding
        moved = (held.to(wide) + half * size * drawn).to(held.dtype)
        return tensor + (moved - held)

    def _stream(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]
