"""The errors that only the controller can tell: a rank that died, ranks that did not finish."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from pdlcheck.errors import RankDied, RankTimeout

__all__ = ["rank_died", "rank_timeout"]

_LINES = 40


def rank_died(rank: int, exitcode: int, last_operation: str, stderr: str) -> RankDied:
    """Make the error for a process that ended without a result."""
    if exitcode < 0:
        how = f"was killed by {_signal_name(-exitcode)}"
    else:
        how = f"ended its process with exit code {exitcode} before its function returned"
    lines = [f"rank {rank} {how}"]
    if last_operation:
        lines.append(f"  last operation  {last_operation}")
    if stderr.strip():
        lines.append("  stderr          " + "\n                  ".join(_tail(stderr)))
    return RankDied("\n".join(lines), rank=rank, exitcode=exitcode, stderr=stderr)


def rank_timeout(timeout_s: float, states: Mapping[int, str], stacks: Mapping[int, str]) -> RankTimeout:
    """Make the error for ranks that are still busy after ``timeout_s``.

    Args:
        states: rank -> where it is or how it ended, for every rank.
        stacks: rank -> its Python stack, for those that did not finish.
    """
    late = ", ".join(map(str, sorted(stacks)))
    word = "rank" if len(stacks) == 1 else "ranks"
    ranks = [f"rank {rank}: {states[rank]}" for rank in sorted(states)]
    shown = [f"stack of rank {rank}, innermost call last:\n{stacks[rank].rstrip()}" for rank in sorted(stacks)]
    head = f"no result within {timeout_s:g} s from {word} {late} of {len(states)}"
    message = "\n  ".join([head, *ranks]) + "\n" + "\n".join(shown)
    return RankTimeout(message, timeout_s=timeout_s, ranks=ranks, stacks=shown)


def _signal_name(signo: int) -> str:
    try:
        return signal.Signals(signo).name
    except ValueError:  # a real-time signal has no name
        return f"signal {signo}"


def _tail(text: str) -> Sequence[str]:
    lines = text.rstrip().splitlines()
    return lines if len(lines) <= _LINES else [f"... {len(lines) - _LINES} lines", *lines[-_LINES:]]
