"""``compute(seconds)``: a declaration of the time of arithmetic that a program leaves out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

__all__ = ["compute", "keep_time"]

_local = threading.local()


def compute(seconds: float) -> None:
    """Compute on this rank for ``seconds``.

    On a simulated rank, this advances the virtual clock by ``seconds`` at once, times the factor of a
    :class:`pdlcheck.faults.Slow`; without a clock (no ``topology=``) nothing happens. Elsewhere, for example on
    ``gloo``, the caller sleeps. So the same program can be measured there and compared with its prediction.

    Args:
        seconds: at least 0, finite.

    Raises:
        ValueError: ``seconds`` is negative, infinite or NaN.

    Example:
        >>> from pdlcheck.clock import Link, Topology
        >>> from pdlcheck.worlds import get_world
        >>> world = get_world("sim", topology=Topology(intra=Link()))
        >>> world.run(lambda: compute(3600.0), world_size=2)
        [None, None]
        >>> world.timeline.step_time_s
        3600.0
    """
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be at least 0 and finite, got {seconds!r}; pass seconds, such as 0.001")
    keeper: Callable[[float], None] | None = getattr(_local, "keeper", None)
    if keeper is None:
        time.sleep(seconds)
    else:
        keeper(seconds)


def keep_time(keeper: Callable[[float], None] | None) -> None:
    """Set the function that receives the seconds that this thread computes; None: the thread sleeps."""
    _local.keeper = keeper
