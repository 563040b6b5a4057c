"""How much memory a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["saved_activation_bytes"]


def saved_activation_bytes(module: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes that ``forward`` keeps for backward, without the parameters of ``module``. No communication.

    A piece of memory that several operations keep counts once, with the elements that they see of it. The casts
    of weights that autocast makes do count: they are kept too.

    Args:
        module: its parameters and buffers are there anyway and do not count.
        forward: called once, under the autocast that is to be measured.

    Returns:
        Bytes of the tensors that autograd saved.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> saved_activation_bytes(net, lambda: net(torch.zeros(10, 4)))    # the input and what tanh gave
        320

    Source: "halves memory" in "How to scale training on multiple GPUs" (2019), measured.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    kept: dict[int, tuple[int, Tensor]] = {}  # the tensor too, so that its memory is not used again

    def pack(tensor: Tensor) -> Tensor:
        place, nbytes = tensor.untyped_storage().data_ptr(), tensor.numel() * tensor.element_size()
        if place not in known and nbytes > kept.get(place, (0,))[0]:
            kept[place] = nbytes, tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(nbytes for nbytes, _ in kept.values())
