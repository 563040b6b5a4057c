"""The profiler of torch, of which a process has one.

A second rank that started it beside the first would end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from pdlcheck.compat.patches import Patch
from pdlcheck.compat.torch.patched import DISABLE_PROFILER, ENABLE_PROFILER, PREPARE_PROFILER
from pdlcheck.errors import Unsupported
from pdlcheck.worlds.observe import user_line
from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread, current_rank

__all__ = ["PATCHES"]

_profiling: tuple[RankThread, str] | None = None  # the rank, and the line that started it


def _start(start: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(start)
    def started(*args: Any, **kwargs: Any) -> Any:
        global _profiling
        rank = current_rank()
        if rank is not None:
            if _profiling is not None and _profiling[0] is not rank and _profiling[0].outcome is None:
                other, line = _profiling
                raise Unsupported(
                    f"rank {rank.rank} starts torch's profiler, at {user_line()}, while that of rank {other.rank} "
                    f"runs, started at {line}; a process has one, which simulated ranks share: profile on one rank "
                    "at a time, or test this on processes, with --world gloo"
                )
            _profiling = rank, user_line()
        return start(*args, **kwargs)

    return started


def _stop(stop: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stop)
    def stopped(*args: Any, **kwargs: Any) -> Any:
        global _profiling
        if _profiling is not None and _profiling[0] is current_rank():
            _profiling = None
        return stop(*args, **kwargs)

    return stopped


PATCHES = tuple(
    Patch(name.owner, name.attribute, make, "a process has one profiler: the second rank that starts it gets an error")
    for name, make in ((PREPARE_PROFILER, _start), (ENABLE_PROFILER, _start), (DISABLE_PROFILER, _stop))
    if name.is_there()
)
