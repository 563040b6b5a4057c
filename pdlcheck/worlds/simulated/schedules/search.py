"""The search for a schedule under which a program fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdlcheck.errors import Inconclusive, PdlcheckError
from pdlcheck.worlds.simulated.schedules.exhaustive import Exhaustive
from pdlcheck.worlds.simulated.schedules.first import First
from pdlcheck.worlds.simulated.schedules.pct import PCT
from pdlcheck.worlds.simulated.schedules.protocol import Schedule
from pdlcheck.worlds.simulated.schedules.replay import Recorder, Replay
from pdlcheck.worlds.simulated.schedules.shrink import Switches, shrink
from pdlcheck.worlds.simulated.schedules.uniform import Random
from pdlcheck.worlds.site import site_of

__all__ = ["Failure", "search", "search_all", "variety"]

Run = Callable[[Schedule], BaseException | None]
_DEPTHS = (2, 3, 4)


@dataclass(frozen=True)
class Failure:
    """A schedule under which the program fails.

    Args:
        error: the error under the shrunk schedule.
        found: the schedule that failed first.
        runs: the number of schedules that were run, up to and including ``found``.
        switches: the number of its switches that ``first`` would not have made.
        replay: the shrunk schedule.
    """

    error: BaseException
    found: Schedule
    runs: int
    switches: int
    replay: Replay


def variety(number: int, steps: int) -> Schedule:
    """Return the schedule of this number: ``first``, then in turn random ones and PCT of depth 2, 3, 4.

    Args:
        number: counted from 0.
        steps: number of switch points of a run, for PCT.
    """
    if number == 0:
        return First()
    return Random(number) if number % 2 else PCT(number, _DEPTHS[number // 2 % 3], max(steps, 1))


def search(run: Run, count: int) -> Failure | None:
    """Run up to ``count`` different schedules and shrink the first that fails; return None if none does.

    Args:
        run: runs the program on new ranks under a schedule; returns the exception that it raised, or None.
        count: number of schedules to try.

    Example:
        >>> from pdlcheck.worlds import get_world
        >>> def take_two():
        ...     if dist.get_rank():
        ...         dist.send(torch.zeros(1), 0)
        ...     else:
        ...         assert dist.recv(torch.zeros(1)) < dist.recv(torch.zeros(1))
        >>> def run(schedule):
        ...     try:
        ...         get_world("sim", schedule=schedule).run(take_two, world_size=3)
        ...     except AssertionError as error:
        ...         return error
        >>> print(search(run, 50).replay)
        replay:0r2
    """
    steps = 1
    for number in range(count):
        recorder = Recorder(variety(number, steps))
        error = run(recorder)
        if error is not None:
            return _shrunk(run, recorder, error, number + 1)
        steps = max(steps, recorder.steps)
    return None


def search_all(run: Run, at_most: int) -> Failure | None:
    """Run all schedules that differ, and shrink the first that fails; return None if none does.

    Args:
        run: see :func:`search`.
        at_most: the largest number of schedules to run.

    Raises:
        Inconclusive: there are more schedules than ``at_most``, and none of those that were run failed.
    """
    every = Exhaustive()
    runs = 0
    while every.advance():
        if runs == at_most:
            raise Inconclusive(f"no schedule of the {runs} that were run fails, but there are more; raise at_most")
        runs += 1
        recorder = Recorder(every)
        error = run(recorder)
        if error is not None:
            return _shrunk(run, recorder, error, runs)
    return None


def _shrunk(run: Run, recorder: Recorder, error: BaseException, runs: int) -> Failure:
    failure = _kind(error)
    found = recorder.replay()

    def fails(switches: Switches) -> Switches | None:
        attempt = Recorder(Replay(switches, strict=False, every_post=found.every_post))
        raised = run(attempt)
        return attempt.switches if raised is not None and _kind(raised) == failure else None

    shortest = Replay(shrink(found.switches, fails), every_post=found.every_post)
    raised = run(shortest)  # reports are about the last run, so this must be the last
    if raised is None or _kind(raised) != failure:
        raised, shortest = error, found  # the program depends on more than its schedule
    return Failure(raised, recorder.schedule, runs, len(found.switches), shortest)


def _kind(error: BaseException) -> tuple[type, str]:
    """Return a key that is equal for failures that count as one while a schedule is shrunk.

    Verdicts count as one if they have the same type. Other errors must also come from the same line.
    """
    return type(error), "" if isinstance(error, PdlcheckError) else site_of(error)
