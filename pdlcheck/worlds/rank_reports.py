"""The errors that only the controller can make: for a rank that died, and for ranks that did not finish."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from pdlcheck.errors import RankDied, RankTimeout
from pdlcheck.operations.words import alike, in_common, who
from pdlcheck.worlds.stack_position import is_machinery

__all__ = ["ProcessEnd", "rank_died", "rank_interrupt", "rank_timeout", "take_stack"]

_LINES = 40
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_DUMP = re.compile(r"^.*\(most recent call first\):\n(?P<frames>(?:  .*\n?)+)", re.MULTILINE)
_LIBRARIES = re.compile(r"\n*^Extension modules: .*\(total: \d+\)$", re.MULTILINE)  # the end of a crash dump


class ProcessEnd(Protocol):
    """The end of a rank's process."""

    @property
    def exitcode(self) -> int:
        """Return the exit code; minus the signal if a signal ended the process."""

    @property
    def how(self) -> str:
        """Return in words how the process ended."""


def rank_died(rank: int, died: ProcessEnd, last_operation: str, stderr: str) -> RankDied:
    """Make the error for a process that ended without a result."""
    exitcode = died.exitcode
    lines = [f"rank {rank} {died.how}"]
    if exitcode >= 0:
        lines[0] += " before its function returned"
    if last_operation:
        lines.append(f"  last operation  {last_operation}")
    if stderr.strip():
        lines.append("  stderr          " + "\n                  ".join(_tail(_without_machinery(stderr))))
    return RankDied("\n".join(lines), rank=rank, exitcode=exitcode, stderr=stderr)


def rank_timeout(timeout_s: float, states: Mapping[int, str], stacks: Mapping[int, str | None]) -> RankTimeout:
    """Make the error for ranks that are still busy after ``timeout_s``.

    Args:
        timeout_s: the time limit of the call.
        states: rank -> where it is or how it ended, for every rank.
        stacks: rank -> its Python stack, for the ranks that did not finish; None for a stack without information.
    """
    known = {rank: stack.rstrip() for rank, stack in sorted(stacks.items()) if stack is not None}
    head = f"no result within {timeout_s:g} s from {who([sorted(stacks)])} of {len(states)}"
    shown = [_stack_of(ranks, stack) for stack, ranks in alike(known).items()]
    return RankTimeout(
        "\n  ".join([head, *in_common(_by_rank(states))]) + "\n" + "\n".join(shown),
        timeout_s=timeout_s,
        ranks=[f"rank {rank}: {state}" for rank, state in _by_rank(states).items()],
        stacks=[_stack_of([rank], stack) for rank, stack in known.items()],
    )


def rank_interrupt(states: Mapping[int, str], late: Iterable[int]) -> str:
    """Return in words where the ranks are when Ctrl-C ends them.

    Args:
        states: as for :func:`rank_timeout`.
        late: the ranks that have not ended.
    """
    return "\n  ".join(
        [f"interrupted before {who([sorted(late)])} of {len(states)} had ended", *in_common(_by_rank(states))]
    )


def _by_rank(states: Mapping[int, str]) -> dict[int, str]:
    return {rank: states[rank] for rank in sorted(states)}


def take_stack(stderr: str) -> tuple[str, str]:
    """Split off faulthandler's dump at the end of a rank's stderr; return the rest and the stack, innermost last."""
    found = list(_DUMP.finditer(stderr))
    if not found:
        return stderr, ""
    frames = [_FRAME.sub(r'  File "\1", line \2, in \3', line) for line in _users(found[-1]["frames"].splitlines())]
    return stderr[: found[-1].start()] + stderr[found[-1].end() :], "\n".join(reversed(frames))


def _without_machinery(stderr: str) -> str:
    """Return a rank's stderr with faulthandler's dumps cut to the calls from the user's test to the end."""

    def cut(dump: re.Match[str]) -> str:
        head, _, _ = dump[0].partition("\n")
        return "\n".join([head, *_users(dump["frames"].splitlines()), ""])

    return _LIBRARIES.sub("", _DUMP.sub(cut, stderr))


def _users(frames: Sequence[str]) -> Sequence[str]:
    """Return the frames of the user and of the libraries that the user calls; all frames if there are none of these."""
    chosen = [line for line in frames if not ((frame := _FRAME.match(line)) and is_machinery(frame[1]))]
    return chosen or frames


def _stack_of(ranks: Sequence[int], stack: str) -> str:
    if not stack:
        return f"stack of {who([ranks])}: it cannot be asked"
    return f"stack of {who([ranks])}, innermost call last:\n{stack}"


def _tail(text: str) -> Sequence[str]:
    lines = text.rstrip().splitlines()
    return lines if len(lines) <= _LINES else [f"... {len(lines) - _LINES} lines", *lines[-_LINES:]]
