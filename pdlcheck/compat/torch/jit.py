"""The private names of ``torch.jit``."""

from __future__ import annotations

from typing import Final

from pdlcheck.compat.private import name

__all__ = ["WAIT"]

WAIT: Final = name(
    "torch._C.wait",
    "the wait of torch.jit for a future, which then works for operations written in Python",
    lost="torch.jit.wait for an operation blocks for ever",
)
