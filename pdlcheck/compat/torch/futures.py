"""Futures of work."""

from __future__ import annotations

from typing import Any

from pdlcheck.compat.private import take

__all__ = ["Future"]

Future: Any = take(
    "torch._C.Future",
    "the base class of torch.futures.Future; hooks written in C++ return its instances",
    lost="DistributedDataParallel takes no communication hooks",
)
