"""The marker ``gpu``."""

from __future__ import annotations

import pytest

from pdlcheck.worlds.devices import CUDA_CURE, why_no_cuda

__all__ = ["require_cuda"]


def require_cuda() -> None:
    """Skip the test where torch finds no CUDA device."""
    if why := why_no_cuda():
        pytest.skip(f"needs CUDA: {why}; install {CUDA_CURE}")
