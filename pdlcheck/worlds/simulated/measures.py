"""The measurements of a simulated world: the traffic of its last run and, if requested, its times."""

from __future__ import annotations

from collections.abc import Iterable

from pdlcheck.clock.links import Topology
from pdlcheck.clock.replay import replay
from pdlcheck.clock.timeline import Timeline
from pdlcheck.errors import Inconclusive, Unsupported
from pdlcheck.faults import Slow
from pdlcheck.worlds.observe import Traffic
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.observers.recorder import Recorder
from pdlcheck.worlds.simulated.observers.traffic_count import TrafficCount

__all__ = ["Measures"]


class Measures:
    """The measurements of one world. Every run starts them anew.

    Args:
        topology: see :class:`pdlcheck.worlds.simulated.SimulatedWorld`.
        timeline: see :class:`pdlcheck.worlds.simulated.SimulatedWorld`.

    Attributes:
        runs: the number of runs.
    """

    def __init__(self, topology: Topology | None, timeline: bool) -> None:
        self.runs = 0
        self.wanted = timeline or topology is not None
        self.topology = topology
        self.forget()

    def forget(self) -> None:
        """Discard the measurements of the last run, as if there had been no run."""
        self._slow: dict[int, Slow] = {}
        self._traffic: Traffic | None = None
        self._recorder: Recorder | None = None
        self._timeline: Timeline | None = None
        self._recording: Recorder | None = None  # of the run under way

    def check(self, world_size: int, faults: Iterable[object]) -> dict[int, Slow]:
        """Return the slow ranks among the faults.

        Raises:
            ValueError: the faults or the topology do not fit the world.
        """
        if self.topology is not None:
            self.topology.check(world_size)
        slow: dict[int, Slow] = {}
        for fault in faults:
            if not isinstance(fault, Slow):
                continue
            if self.topology is None:
                raise ValueError(f"{fault} acts on the virtual clock; pass topology=Topology(intra=Link(...)) too")
            if not 0 <= fault.rank < world_size:
                raise ValueError(f"{fault}: with world_size={world_size} a rank is one of 0 to {world_size - 1}")
            if fault.rank in slow:
                raise ValueError(f"faults has {slow[fault.rank]} and {fault} for one rank; multiply their factors")
            slow[fault.rank] = fault
        return slow

    def begin(self, world_size: int, faults: Iterable[object]) -> list[Observer]:
        """Start the measurements of a run; return the observers that measure it."""
        self.runs += 1
        self._slow = self.check(world_size, faults)
        self._counting, self._recording = TrafficCount(world_size), None
        if not self.wanted:
            return [self._counting]
        self._recording = Recorder(world_size, {rank: fault.factor for rank, fault in self._slow.items()})
        return [self._counting, self._recording]

    def end(self) -> None:
        """Keep the measurements of a run that has ended, with or without an error."""
        self._traffic, self._recorder, self._timeline = self._counting.traffic, self._recording, None

    def check_slowed(self) -> None:
        """Check, after a run that succeeded, that each slow rank had computations to slow down.

        Raises:
            Inconclusive: a slow rank had none.
        """
        for rank, fault in self._slow.items():
            if self._recorder is not None and rank not in self._recorder.slowed:
                raise Inconclusive(f"{fault} did not come about: the rank does not call pdlcheck.clock.compute")

    @property
    def traffic(self) -> Traffic:
        """Return the traffic of the last run.

        Raises:
            RuntimeError: there was no run yet.
        """
        if self._traffic is None:
            raise RuntimeError("world.traffic is about the last run, and there was none; call world.run first")
        return self._traffic

    @property
    def timeline(self) -> Timeline:
        """Return the timeline of the last run.

        Raises:
            Unsupported: the world keeps no times.
            RuntimeError: there was no run yet.
        """
        if not self.wanted:
            raise Unsupported(
                'this world keeps no times: get_world("sim", topology=Topology(intra=Link(...))) for seconds, or '
                'get_world("sim", timeline=True) for the order alone'
            )
        if self._recorder is None:
            raise RuntimeError("world.timeline is about the last run, and there was none; call world.run first")
        if self._timeline is None:
            self._timeline = replay(self._recorder.trace, self.topology)
        return self._timeline
