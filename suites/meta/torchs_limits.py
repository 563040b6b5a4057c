"""Operations that torch itself cannot do on some machines; tests of them are skipped there."""

from __future__ import annotations

import pytest
import torch

__all__ = ["NO_POWER_SGD"]

NO_POWER_SGD = pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch's PowerSGD synchronizes CUDA where there is one, for CPU tensors too"
)
