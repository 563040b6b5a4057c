"""Layers that a backward pass runs again, as activation checkpointing does, with other random numbers than before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.compat.torch.autograd import in_backward

__all__ = ["record_redrawn"]


@contextmanager
def record_redrawn(model: nn.Module) -> Iterator[set[str]]:
    """Record the layers that draw other random numbers in a backward pass than in any forward pass of the block."""
    redrawn: set[str] = set()
    entered: dict[str, bytes] = {}
    drew: defaultdict[str, set[bytes]] = defaultdict(set)  # the states with which a layer began to draw

    def watch(name: str, layer: nn.Module) -> list[Any]:
        def before(*_: Any) -> None:
            entered[name] = _random_state(layer)
            if in_backward() and name in drew and entered[name] not in drew[name]:
                redrawn.add(name)

        def after(*_: Any) -> None:
            if not in_backward() and _random_state(layer) != entered[name]:
                drew[name].add(entered[name])

        return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]

    layers = [(name, layer) for name, layer in model.named_modules() if not any(layer.children())]
    hooks = [hook for name, layer in layers for hook in watch(name, layer)]
    try:
        yield redrawn
    finally:
        for hook in hooks:
            hook.remove()


def _random_state(layer: nn.Module) -> bytes:
    devices = {tensor.device for tensor in layer.parameters() if tensor.is_cuda}
    if not devices and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = {torch.device("cuda", torch.cuda.current_device())}
    states: list[Tensor] = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return b"".join(state.numpy().tobytes() for state in states)
