"""Flags that torch keeps for the whole process in C++, and that its context managers set: each rank has its own.

They control attention kernels (``sdpa_kernel``), determinism, anomaly detection, oneDNN, and the precision of products
in float32. The start method of multiprocessing, which a program sets once, is one of them too.
"""

from __future__ import annotations

import multiprocessing.context
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["present", "put"]

_c: Any = torch._C
_PAIRS = (
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
)
_starts: Any = getattr(multiprocessing.context, "_default_context")  # noqa: B009 - its type stub does not export it
_known = [(getattr(_c, get), getattr(_c, put)) for get, put in _PAIRS if hasattr(_c, get) and hasattr(_c, put)]
_getters: list[Callable[[], Any]] = [
    *(get for get, _ in _known),
    *(_c._get_deterministic_algorithms, _c._get_deterministic_algorithms_warn_only),
    *(_c.is_anomaly_enabled, _c.is_anomaly_check_nan_enabled),
    lambda: _starts._actual_context,
]


def present() -> tuple[Any, ...]:
    """Return all flags, always in the same order."""
    return tuple([get() for get in _getters])


def put(wanted: tuple[Any, ...]) -> None:
    """Set the flags that differ from ``wanted``."""
    now = present()
    if now == wanted:
        return
    for (_, setter), value, own in zip(_known, wanted, now, strict=False):
        if value != own:
            setter(value)
    *_, deterministic, warn_only, anomaly, check_nan, _starts._actual_context = wanted
    if now[-5:-3] != wanted[-5:-3]:
        _c._set_deterministic_algorithms(deterministic, warn_only=warn_only)
    if now[-3:-1] != wanted[-3:-1]:
        _c.set_anomaly_enabled(anomaly, check_nan)
