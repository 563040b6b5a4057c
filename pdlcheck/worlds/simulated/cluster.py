"""The ranks of a simulated world, with what they need to communicate: engine, store and process groups."""

from __future__ import annotations

from collections.abc import Sequence

from pdlcheck.faults import Fault, Slow
from pdlcheck.worlds.modes import are_left_on
from pdlcheck.worlds.observe import WatchedGroup
from pdlcheck.worlds.semantics import Semantics
from pdlcheck.worlds.simulated.c10d.foreign_groups import Ended, GroupOwnership
from pdlcheck.worlds.simulated.c10d.install import is_pristine, rebind_to_world
from pdlcheck.worlds.simulated.c10d.simulated_stores import forget_servers
from pdlcheck.worlds.simulated.c10d.store import SimulatedStore
from pdlcheck.worlds.simulated.engine.engine import SimulatedEngine
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.observers.buffer_hazards import BufferHazards
from pdlcheck.worlds.simulated.observers.descriptions import Descriptions
from pdlcheck.worlds.simulated.observers.fault_injection import FaultInjector
from pdlcheck.worlds.simulated.observers.leaks import Leaks
from pdlcheck.worlds.simulated.observers.poison import Poison
from pdlcheck.worlds.simulated.observers.set_order import SetOrder
from pdlcheck.worlds.simulated.observers.tensor_sharing import TensorSharing
from pdlcheck.worlds.simulated.process_state.device_guard import outlives_ranks
from pdlcheck.worlds.simulated.process_state.isolation import PerRankState, isolated_controller
from pdlcheck.worlds.simulated.scheduling.rank_state import Isolation
from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread

__all__ = ["ISOLATION", "Cluster"]

ISOLATION = Isolation(PerRankState, isolated_controller, outlives_ranks)


class Cluster:
    """The rank threads of one world size. They serve one world after another.

    Attributes:
        descriptions: the texts of the operations of the last run.
        worn: whether a rank has left something behind that the next world's ranks would find.
    """

    def __init__(self, world_size: int) -> None:
        self.engine = SimulatedEngine(world_size, ISOLATION)
        self.scheduler = self.engine.scheduler
        self.store = SimulatedStore(self.scheduler)
        self.descriptions = Descriptions()
        self.worn = False
        self._forget()

    def serve(self, seed: int, semantics: Semantics) -> None:
        """Reuse these rank threads for another world; only its seed and semantics differ."""
        self.engine.serve(seed, semantics)
        self.store.clear()
        for rank in self.scheduler.ranks:
            if rank.c10d:
                rebind_to_world(rank)

    def begin(self, faults: Sequence[Fault], measures: Sequence[Observer]) -> None:
        """Start a run with these faults. Operations are counted from 0.

        Args:
            faults: the faults of the run.
            measures: the observers that measure the run.
        """
        for rank in self.scheduler.ranks:
            for group in _groups(rank):
                group.count_anew()
        self.engine.begin(self._observers(faults, measures))

    def _observers(self, faults: Sequence[Fault], measures: Sequence[Observer]) -> list[Observer]:
        """Return the observers of a run, in the order in which they see each event."""
        engine, semantics, descriptions = self.engine, self.engine.semantics, Descriptions()
        self.descriptions = descriptions
        observers: list[Observer] = [GroupOwnership(engine), descriptions]
        if len(self.scheduler.ranks) > 1:
            observers += [SetOrder(), TensorSharing()]
        if rank_faults := [fault for fault in faults if not isinstance(fault, Slow)]:
            observers.append(FaultInjector(rank_faults, engine))
        observers += measures  # before those that raise, so that the trace of a failed run has the operation
        if semantics.hazards:
            observers.append(BufferHazards(descriptions.describe))
        if semantics.poison:
            observers.append(Poison(partial_sums=semantics.messages != "in_order"))
        if semantics.leaks and (semantics.unwaited or semantics.unreceived):
            observers.append(Leaks(engine, descriptions.describe))
        return observers

    def leave(self, rank: int) -> None:
        """Release what the running rank holds, because it has ended."""
        for observe in self.engine.events.rank_ended:
            observe(rank)
        self.worn = self.worn or not is_pristine() or are_left_on()

    def reset(self) -> None:
        """Forget everything, after ranks failed in the middle of an operation.

        Each rank makes its default group anew.
        """
        self.worn = True
        forget_servers()
        self.store = SimulatedStore(self.scheduler)
        for rank in self.scheduler.ranks:
            for group in _groups(rank):
                group.end(Ended())
            rank.c10d = {}
        self._forget()

    def break_off(self) -> None:
        """Forget everything except the groups, which may still be torn down.

        The groups may be complete on some ranks only.
        """
        self.worn = True
        forget_servers()
        self._forget()

    def rest(self) -> bool:
        """Drop everything that belongs to the last run; return False if the ranks are not as those of a new cluster."""
        if self.worn:
            forget_servers()
            return False
        self._forget()
        self.scheduler.rest()
        return True

    def _forget(self) -> None:
        self.engine.forget([GroupOwnership(self.engine)])  # a rank of another cluster may have kept one of its groups


def _groups(rank: RankThread) -> list[WatchedGroup]:
    return [group for group in rank.c10d.get("pg_map", ()) if isinstance(group, WatchedGroup)]
