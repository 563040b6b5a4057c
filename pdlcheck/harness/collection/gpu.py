"""The marker ``gpu``."""

from __future__ import annotations

import pytest

from pdlcheck.worlds.devices import CUDA_CURE, why_no_cuda

__all__ = ["require_cuda"]


def require_cuda(config: pytest.Config) -> None:
    """Skip the test if torch finds no CUDA device; fail it with ``--require-gpu``."""
    if why := why_no_cuda():
        words = f"needs CUDA: {why}; install {CUDA_CURE}"
        if config.getoption("--pdl-require-gpu"):
            pytest.fail(f"{words} (--require-gpu)", pytrace=False)
        pytest.skip(words)
