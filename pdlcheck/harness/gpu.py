"""The marker ``gpu``."""

from __future__ import annotations

import pytest
import torch

__all__ = ["require_cuda"]


def require_cuda() -> None:
    """Skip the test where torch finds no CUDA device."""
    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "torch finds no CUDA device"
        pytest.skip(f"needs CUDA: {why}; install a CUDA build of torch on a machine with a GPU")
