"""The memory that a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.primitives.storage_bytes import KeptBytes

__all__ = ["saved_activation_bytes"]


def saved_activation_bytes(module: nn.Module, forward: Callable[[], Any]) -> int:
    """Return the bytes that ``forward`` keeps for backward, without the parameters of ``module``. No communication.

    Memory that several operations keep counts once, with all elements that any of them uses. Casts of weights by
    autocast count, because they are kept too.

    Args:
        module: its parameters and buffers exist in any case and do not count.
        forward: called once; uses the autocast settings to measure.

    Returns:
        Bytes of the tensors that autograd saved.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> saved_activation_bytes(net, lambda: net(torch.zeros(10, 4)))    # the input and what tanh gave
        320

    Source: "halves memory" in "How to scale training on multiple GPUs" (2019), measured.
    """
    parameters = KeptBytes()
    for tensor in [*module.parameters(), *module.buffers()]:
        parameters.add(tensor)
    kept = KeptBytes(but=parameters)

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return kept.nbytes
