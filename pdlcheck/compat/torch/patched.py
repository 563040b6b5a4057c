"""The private functions and objects of torch that patches replace while simulated ranks are open."""

from __future__ import annotations

from typing import Final

from pdlcheck.compat.private import name

__all__ = ["DISABLE_PROFILER", "ENABLE_PROFILER", "PREPARE_PROFILER", "STANCE"]

_PROFILER: Final = "an error for a second simulated rank that starts torch's profiler"
_LOST: Final = "such a rank ends the process"
DISABLE_PROFILER: Final = name("torch.autograd.profiler._disable_profiler", _PROFILER, lost=_LOST)
ENABLE_PROFILER: Final = name("torch.autograd.profiler._enable_profiler", _PROFILER, lost=_LOST)
PREPARE_PROFILER: Final = name("torch.autograd.profiler._prepare_profiler", _PROFILER, lost=_LOST)
STANCE: Final = ("torch._dynamo.eval_frame", "_stance")  # late_names.py has it in the table: its import takes long
