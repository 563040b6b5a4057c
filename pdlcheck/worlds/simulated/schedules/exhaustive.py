"""The exhaustive search over all schedules of a small program that differ in the order of dependent steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdlcheck.errors import ScheduleNotFollowed
from pdlcheck.worlds.simulated.schedules.access import Access, Post
from pdlcheck.worlds.simulated.schedules.dependency import Dependency, can_complete
from pdlcheck.worlds.simulated.schedules.protocol import SwitchPoint, usual

__all__ = ["Exhaustive"]

_Clock = list[int]  # for each rank, the number of its last step that must come before


@dataclass
class _Node:
    """A switch point on the present path: the ranks that can go on, the rank that does, and those still to try."""

    enabled: tuple[int, ...]
    pending: tuple[Access | None, ...]
    chosen: int
    todo: set[int]
    asleep: set[int]  # every continuation that begins with one of these ranks is covered by another path
    done: set[int] = field(default_factory=set)

    @property
    def access(self) -> Access | None:
        return self.pending[self.chosen]


class Exhaustive:
    """A depth-first search over schedules: dynamic partial-order reduction with sleep sets.

    Two schedules are one trace if they differ only in the order of neighbouring independent steps
    (:class:`Dependency`): no rank sees a difference. The search runs each trace to its end once. The program must have
    deterministic ranks that act on one another only through ``torch.distributed`` and its store. The search then finds
    every result that some schedule gives. If some schedule fails, it finds one that fails. It does not explore which of
    several failures comes first.

    Use it with new ranks for each run, because groups and collectives are identified by name and number::

        search = Exhaustive()
        while search.advance():
            SimulatedWorld(schedule=search).run(program, world_size=3)

    Args:
        reduction: False runs every schedule, including equal ones. Their number is too large after the first few steps.

    Attributes:
        runs: schedules run to the end that differ in a dependent step.
        redundant: runs that were given up, because every continuation was covered already.

    Source: Flanagan and Godefroid, "Dynamic partial-order reduction for model checking software", POPL 2005; sleep
    sets: Godefroid, "Partial-Order Methods for the Verification of Concurrent Systems", LNCS 1032 (1996).
    """

    every_step = True
    every_post = True  # the search needs the next access of each rank

    def __init__(self, *, reduction: bool = True) -> None:
        self.depends = Dependency()
        self.runs = self.redundant = 0
        self._reduction = reduction
        self._path: list[_Node] = []
        self._started = False

    def advance(self) -> bool:
        """Move to the next schedule; return False if all have been covered."""
        if not self._started:
            self._started = True
            return True
        if self._cut is None:
            self.runs += 1
        else:
            self.redundant += 1
        if self._reduction:
            if self._learn():
                self._path.clear()  # schedules that were left out may matter: start again with the new dependencies
                self.runs = self.redundant = 0
                return True
            _Races(self._path, self.depends).find(self._last_pending())
        while self._path:
            node = self._path[-1]
            node.done.add(node.chosen)
            left = node.todo - node.done - node.asleep
            if left:
                node.chosen = min(left)
                return True
            self._path.pop()
        return False

    # -- one run -----------------------------------------------------------------------------------

    def begin(self, world_size: int) -> None:
        """Start a run of the present schedule."""
        self._depth = 0
        self._asleep: set[int] = set()
        self._cut: int | None = None  # the step from which the run is redundant
        self._pending: Sequence[Access | None] = ()

    def choose(self, point: SwitchPoint) -> int:
        """Return the rank that the present schedule chooses.

        Raises:
            ScheduleNotFollowed: other ranks can go on than in an earlier run.
        """
        self._pending = point.pending
        if self._cut is not None:
            return usual(point)
        if self._depth == len(self._path):
            awake = [rank for rank in point.runnable if rank not in self._asleep]
            if not awake:
                self._cut = self._depth
                return usual(point)
            chosen = usual(point)
            chosen = chosen if chosen in awake else awake[0]
            todo = {chosen} if self._reduction else set(point.runnable)
            self._path.append(_Node(point.runnable, tuple(point.pending), chosen, todo, self._asleep))
        node = self._path[self._depth]
        if node.enabled != point.runnable:
            raise ScheduleNotFollowed(
                f"at step {self._depth} ranks {list(node.enabled)} could go on before, now {list(point.runnable)}: the "
                "program does not depend on its schedule alone (time, shared globals, an unseeded random stream)"
            )
        node.pending = tuple(point.pending)  # this run may post something else
        sleepers = (node.asleep | node.done) - {node.chosen} if self._reduction else set()
        self._asleep = {rank for rank in sleepers if not self.depends(node.pending[rank], node.access)}
        self._depth += 1
        return node.chosen

    # -- between two runs --------------------------------------------------------------------------

    def _learn(self) -> bool:
        return sum(self.depends.learn(node.access) for node in self._path) > 0  # any() would stop at the first

    def _last_pending(self) -> Sequence[Access | None]:
        return () if self._cut is not None else tuple(self._pending)

    def __str__(self) -> str:
        return "all"


class _Races:
    """The search for pairs of dependent steps of one run that could have come in the other order."""

    def __init__(self, path: Sequence[_Node], depends: Dependency) -> None:
        self._path = path
        self._depends = depends

    def find(self, last_pending: Sequence[Access | None]) -> None:
        """Add the other order of each race to the orders to try.

        Args:
            last_pending: the accesses that were pending on ranks that never ended.
        """
        path = self._path
        world_size = len(path[0].pending) if path else 0
        after: list[_Clock] = [[-1] * world_size for _ in range(world_size)]  # the clock of each rank's next step
        of_step: list[_Clock] = []
        last_step: list[int] = [-1] * world_size
        met: dict[tuple[str, int], tuple[int, _Clock]] = {}  # collective -> the number of its posts, and their clock
        for number, node in enumerate(path):
            rank, access = node.chosen, node.access
            self._reverse_last(number, rank, access, after[rank])
            clock = list(after[rank])
            for before in range(number):
                if self._depends(path[before].access, access):
                    _join(clock, of_step[before])
            clock[rank] = number
            of_step.append(clock)
            after[rank] = list(clock)
            last_step[rank] = number
            # a collective is complete after all of its posts, and a message after both
            if isinstance(access, Post) and not access.signature.is_p2p:
                key = (access.signature.group, access.signature.seq)
                count, together = met.get(key, (0, [-1] * world_size))
                _join(together, clock)
                met[key] = count + 1, together
                if count + 1 == len(access.signature.members):
                    _join(after[rank], together)
            awoken = set(path[number + 1].enabled) - set(node.enabled) - {rank} if number + 1 < len(path) else set()
            for other in awoken:
                partner = last_step[other]
                if partner >= 0 and can_complete(path[partner].access, access):
                    _join(after[rank], of_step[partner])
            for other in awoken:
                _join(after[other], after[rank] if isinstance(access, Post) else clock)
        for rank, access in enumerate(last_pending):
            self._reverse_last(len(path), rank, access, after[rank])

    def _reverse_last(self, number: int, rank: int, access: Access | None, clock: _Clock) -> None:
        """Find the last step that races with this one, and have this rank, or a rank that it needs, tried before it."""
        if access is None:
            return
        for before in reversed(range(number)):
            node = self._path[before]
            if node.chosen == rank or not self._depends(node.access, access) or clock[node.chosen] >= before:
                continue
            if rank in node.enabled:
                node.todo.add(rank)
                return
            leads_there = {other for other in node.enabled if clock[other] > before}
            if not leads_there:
                node.todo.update(node.enabled)
            elif leads_there.isdisjoint(node.todo):
                node.todo.add(min(leads_there))
            return


def _join(clock: _Clock, other: Iterable[int]) -> None:
    clock[:] = map(max, clock, other)
