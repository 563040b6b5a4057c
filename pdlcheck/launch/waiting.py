"""Reports of waiting processes while a launch comes together. This module does not import torch."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdlcheck.time_budgets import NOTICE_PAUSE_S

__all__ = ["CURE", "reported"]

CURE = "to run on this machine alone, unset the launcher's variables, such as RANK, or: pytest --pdl-launch=ignore"


@contextmanager
def reported(waits: Callable[[], str], *, first_s: float) -> Iterator[None]:
    """Print to stderr, less and less often, how long the block has been waiting.

    Args:
        waits: returns the waiting and the awaited ranks, such as ``"rank 0 waits for ranks [1] of 2"``.
        first_s: seconds before the first line.
    """
    done, since = threading.Event(), time.monotonic()
    reporter = threading.Thread(target=_report, args=(waits, since, done, first_s), daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()


def _report(waits: Callable[[], str], since: float, done: threading.Event, pause: float) -> None:
    while not done.wait(pause):
        print(
            f"pdlcheck: {waits()} since {time.monotonic() - since:.0f} s; {CURE}",
            file=sys.__stderr__,
            flush=True,
        )
        pause = min(2 * pause, NOTICE_PAUSE_S)
