"""What a simulated world measures: the traffic of its last run, and its times if somebody wants them."""

from __future__ import annotations

from collections.abc import Iterable

from pdlcheck.clock.links import Topology
from pdlcheck.clock.replay import replay
from pdlcheck.clock.timeline import Timeline
from pdlcheck.errors import Inconclusive, Unsupported
from pdlcheck.faults import Slow
from pdlcheck.worlds.simulated.network.network import Network
from pdlcheck.worlds.simulated.recorder import Recorder
from pdlcheck.worlds.watch import Traffic

__all__ = ["Measures"]


class Measures:
    """Begins with each run anew.

    Args:
        topology, timeline: see :class:`pdlcheck.worlds.simulated.SimulatedWorld`.

    Attributes:
        runs: how many there have been.
    """

    def __init__(self, topology: Topology | None, timeline: bool) -> None:
        self.runs = 0
        self.wanted = timeline or topology is not None
        self.topology = topology
        self.forget()

    def forget(self) -> None:
        """As if there had been no run."""
        self._slow: dict[int, Slow] = {}
        self._traffic: Traffic | None = None
        self._recorder: Recorder | None = None
        self._timeline: Timeline | None = None

    def check(self, world_size: int, faults: Iterable[object]) -> dict[int, Slow]:
        """Return the slow ranks among the faults; raise ``ValueError`` where they or the topology do not fit."""
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

    def begin(self, network: Network, faults: Iterable[object]) -> None:
        """A run starts."""
        self.runs += 1
        world_size = len(network.scheduler.ranks)
        self._slow = self.check(world_size, faults)
        if self.wanted:
            network.recorder = Recorder(world_size, {rank: fault.factor for rank, fault in self._slow.items()})

    def end(self, network: Network) -> None:
        """A run has ended, well or not."""
        self._traffic, self._recorder, self._timeline = network.traffic, network.recorder, None
        network.recorder = None

    def check_slowed(self) -> None:
        """After a run that went well: raise ``Inconclusive`` where a slow rank had nothing to be slow at."""
        for rank, fault in self._slow.items():
            if self._recorder is not None and rank not in self._recorder.slowed:
                raise Inconclusive(f"{fault} did not come about: the rank does not call pdlcheck.clock.compute")

    @property
    def traffic(self) -> Traffic:
        if self._traffic is None:
            raise RuntimeError("world.traffic is about the last run, and there was none; call world.run first")
        return self._traffic

    @property
    def timeline(self) -> Timeline:
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
