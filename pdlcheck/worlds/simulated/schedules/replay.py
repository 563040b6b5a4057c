"""Recorded schedules: where they differ from :class:`First`, and for which rank."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pdlcheck.errors import ScheduleNotFollowed
from pdlcheck.worlds.simulated.schedules.protocol import Schedule, SwitchPoint, usual

__all__ = ["Recorder", "Replay"]

_CODE = re.compile(r"(\d+)r(\d+)")
_EVERY_POST = "posts-"


class Replay:
    """A schedule of the usual choices, except the given ones: at choice ``i`` rank ``r`` goes on.

    A choice is a switch point at which more than one rank can go on. Choices are counted from 0 in each run.

    Args:
        switches: choice -> rank.
        strict: raise ``ScheduleNotFollowed`` if a rank cannot go on at its choice; False makes the usual choice
            instead.
        every_post: count the choices of a schedule that is asked before every post; written ``posts-``.

    Example:
        >>> str(Replay({4: 1, 17: 0}))
        'replay:4r1-17r0'
    """

    every_step = False

    def __init__(self, switches: Mapping[int, int], *, strict: bool = True, every_post: bool = False) -> None:
        self.switches = dict(sorted(switches.items()))
        self.every_post = every_post
        self._strict = strict

    @classmethod
    def parse(cls, code: str) -> Replay:
        """Return the schedule for the output of ``str`` without ``replay:``. An empty code is the schedule ``first``.

        Raises:
            ValueError: the code has another form.
        """
        switches = {}
        every_post = code.startswith(_EVERY_POST)
        for item in filter(None, code.removeprefix(_EVERY_POST).split("-")):
            match = _CODE.fullmatch(item)
            if match is None:
                raise ValueError(f"a replay code is a list like 4r1-17r0 (choice 4: rank 1), got {item!r} in {code!r}")
            switches[int(match[1])] = int(match[2])
        return cls(switches, every_post=every_post)

    def begin(self, world_size: int) -> None:
        """Start a run."""
        self._choice = -1

    def choose(self, point: SwitchPoint) -> int:
        """Return the given rank of this choice, or the usual one.

        Raises:
            ScheduleNotFollowed: the given rank cannot go on, and the replay is strict.
        """
        self._choice += 1
        rank = self.switches.get(self._choice)
        if rank is None:
            return usual(point)
        if rank in point.runnable:
            return rank
        if self._strict:
            raise ScheduleNotFollowed(
                f"{self}: at choice {self._choice} rank {rank} cannot go on, only {list(point.runnable)}: the "
                "program, its input or its world size is not the one that was recorded"
            )
        return usual(point)

    def __repr__(self) -> str:
        return f"Replay({self.switches})"

    def __str__(self) -> str:
        switches = [f"{choice}r{rank}" for choice, rank in self.switches.items()]
        return "replay:" + _EVERY_POST * self.every_post + "-".join(switches)


class Recorder:
    """A schedule that follows another one and records its choices."""

    every_step = True

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.every_post = schedule.every_post
        self.switches: dict[int, int] = {}
        self.choices = 0  # switch points at which more than one rank could go on
        self.steps = 0  # all switch points

    def begin(self, world_size: int) -> None:
        """Start a run, and forget the choices of the last one."""
        self.schedule.begin(world_size)
        self.switches = {}
        self.choices = self.steps = 0

    def choose(self, point: SwitchPoint) -> int:
        """Return the choice of the other schedule, and record it if it is not the usual one."""
        self.steps += 1
        if len(point.runnable) == 1:
            return self.schedule.choose(point) if self.schedule.every_step else point.runnable[0]
        rank = self.schedule.choose(point)
        if rank != usual(point):
            self.switches[self.choices] = rank
        self.choices += 1
        return rank

    def replay(self) -> Replay:
        """Return the schedule of the last run."""
        return Replay(self.switches, every_post=self.every_post)

    def __str__(self) -> str:
        return str(self.schedule)
