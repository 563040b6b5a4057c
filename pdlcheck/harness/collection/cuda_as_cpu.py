"""The option ``--cuda-as-cpu`` and the ini value ``pdlcheck_cuda_as_cpu``. Does not import torch."""

from __future__ import annotations

import pytest

__all__ = ["OPTION", "add_option", "runs_cuda_as_cpu"]

OPTION = "--pdl-cuda-as-cpu"
_SHORT = "--cuda-as-cpu"
_INI = "pdlcheck_cuda_as_cpu"


def add_option(parser: pytest.Parser) -> None:
    """Add the option and the ini value."""
    parser.getgroup("pdlcheck").addoption(
        OPTION,
        _SHORT,
        action="store_true",
        default=False,
        help="run the CUDA code of the ranks of sim, gloo and mpi on the CPU: torch.cuda, .cuda(), device arguments, "
        f"backend nccl; docs/cuda-as-cpu.md says what that covers; also the ini value {_INI} = true",
    )
    parser.addini(_INI, "run the CUDA code of the ranks on the CPU, as --cuda-as-cpu does", type="bool", default=False)


def runs_cuda_as_cpu(config: pytest.Config) -> bool:
    """Whether the ranks of this session run CUDA code on the CPU."""
    return bool(config.getoption(OPTION) or config.getini(_INI))
