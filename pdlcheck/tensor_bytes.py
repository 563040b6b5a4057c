"""The bytes of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bytes_of"]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in the logical order of its elements, independent of its strides.

    The result has one dimension, dtype uint8 and the tensor's device. It may share the tensor's memory.

    Example:
        >>> bytes_of(torch.tensor([[1, 2]], dtype=torch.int16)).tolist()
        [1, 0, 2, 0]
    """
    if not tensor.numel():  # torch makes no view of bytes of an empty array of numpy, which has stride 0
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
