"""The option ``--cuda-as-cpu`` and the ini value ``pdlcheck_cuda_as_cpu``. Does not import torch."""

from __future__ import annotations

import pytest

__all__ = ["OPTION", "runs_cuda_as_cpu"]

OPTION = "--pdl-cuda-as-cpu"
_INI = "pdlcheck_cuda_as_cpu"


def runs_cuda_as_cpu(config: pytest.Config) -> bool:
    """Return whether the ranks of this session run CUDA code on the CPU."""
    return bool(config.getoption(OPTION) or config.getini(_INI))
