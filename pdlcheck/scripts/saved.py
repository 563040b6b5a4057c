"""The tensors that a program saves with ``torch.save``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from pdlcheck.compat.patches import Patch, Patches

__all__ = ["SAVES", "Saved", "kept_saves"]

_MOST = 64 * 2**20  # elements that are kept of one rank

Saved = dict[str, Tensor]  # by file and name: "model.pt: layer.weight"
_of_thread: dict[int, Saved] = {}


@contextmanager
def kept_saves() -> Iterator[Saved]:
    """Keep the tensors of floating point that the calling rank saves, where ``SAVES`` is in force.

    Of a file that is saved again, the last ones are kept.
    """
    saved: Saved = {}
    _of_thread[threading.get_ident()] = saved
    try:
        yield saved
    finally:
        del _of_thread[threading.get_ident()]


def _keeping(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        saved = _of_thread.get(threading.get_ident())
        if saved is not None:
            file = os.path.basename(os.fspath(f)) if isinstance(f, str | os.PathLike) else "a buffer"
            for name, tensor in _tensors(obj, ""):
                if sum(one.numel() for one in saved.values()) + tensor.numel() <= _MOST:
                    saved[f"{file}: {name}"] = tensor.detach().to("cpu", torch.float64, copy=True)
        return real(obj, f, *args, **kwargs)

    return save


SAVES = Patches([Patch(torch, "save", _keeping, "what a program saves is compared", True)])


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if type(value) in (Tensor, torch.nn.Parameter):
        if value.is_floating_point():
            yield name or "the tensor", value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(one, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _tensors(one, f"{name}.{index}".lstrip("."))
