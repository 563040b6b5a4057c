"""The simulated world: ranks are threads under a scheduler, and the detection of deadlocks is exact."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import finalize

from pdlcheck.clock.computing import keep_time
from pdlcheck.clock.links import Topology
from pdlcheck.clock.timeline import Timeline
from pdlcheck.errors import Inconclusive, WorldUnavailable
from pdlcheck.faults import DrawnFaults, Fault
from pdlcheck.time_budgets import LEAST_LIMIT_S
from pdlcheck.worlds.advice import advise
from pdlcheck.worlds.arguments import check_faults, check_function, check_names, check_world_size
from pdlcheck.worlds.cuda_as_cpu.mode import in_mode
from pdlcheck.worlds.devices import CUDA_CURE, choose_device, why_no_cuda
from pdlcheck.worlds.exceptions import add_note
from pdlcheck.worlds.observe import Traffic, declare_wrappers
from pdlcheck.worlds.outcome import ENDS_A_PROCESS, Outcome, Raised, Returned, as_failure, check_has_run, results
from pdlcheck.worlds.protocol import CLOSED, INSIDE, NOT_SENT
from pdlcheck.worlds.rank_devices import RankDevices
from pdlcheck.worlds.semantics import Semantics, make_semantics
from pdlcheck.worlds.simulated import rank_pool
from pdlcheck.worlds.simulated.c10d.foreign_groups import explain_foreign_group
from pdlcheck.worlds.simulated.c10d.install import (
    IN_RANKS,
    has_group,
    has_left_group,
    join_group,
    join_without_group,
    rank_local_torch_distributed,
)
from pdlcheck.worlds.simulated.cluster import Cluster
from pdlcheck.worlds.simulated.engine.engine import SimulatedEngine
from pdlcheck.worlds.simulated.engine.gloo_errors import is_consequence
from pdlcheck.worlds.simulated.measures import Measures
from pdlcheck.worlds.simulated.module_globals import import_time_draws, import_time_reads
from pdlcheck.worlds.simulated.module_globals.modules import RankLocalModules, known_own_globals
from pdlcheck.worlds.simulated.observers.fault_injection import FaultInjector, faults_of
from pdlcheck.worlds.simulated.process_state.arguments import own_copy
from pdlcheck.worlds.simulated.process_state.observed_globals import OBSERVED
from pdlcheck.worlds.simulated.schedules import Schedule, schedule_of
from pdlcheck.worlds.simulated.scheduling.rank_threads import rank_behind
from pdlcheck.worlds.simulated.scheduling.scheduler import RankGone, current_rank, running_rank

__all__ = ["SimulatedWorld"]

_LATER = 1_000_000  # orders the death of a rank after every failure of a survivor
_one_cluster_at_a_time = threading.RLock()
_holders: set[int] = set()  # ids of worlds that have had ranks and are not closed
_open_clusters: set[int] = set()  # ids of threads, because the reentrant lock lets one thread in twice


class SimulatedWorld:
    """The world ``sim``: ranks are threads of this process, and one of them runs at a time.

    Args:
        seed: the seed of the ranks' random streams. The streams are the same under every schedule.
        schedule: the rule that chooses the next rank at each switch point. Pass a name that ``--schedule`` takes:
            ``first``, ``random`` (uses ``seed``), ``random:7``, ``pct:7,3``, ``replay:4r1-17r0``; or a schedule itself.
            Every run starts it anew.
        semantics: the choices that torch's rules leave open; a :class:`Semantics` or the name of a profile.
        faults: the faults injected into the ranks (:mod:`pdlcheck.faults`). If all survivors return, the run returns as
            well. The value of a lost rank is then its ``RankDied`` or ``RankStalled``. A fault that did not come about
            raises ``Inconclusive``.
        topology: the cost of messages on the virtual clock. It makes :attr:`timeline` available, in seconds.
        timeline: record a :attr:`timeline` without a topology too, in steps.
        own_globals: modules or packages whose globals each rank has for itself, as a process has. All other globals are
            shared. Ranks start with the controller's globals, and keep their own as long as they are open.
        comm_wrappers: modules or packages through which the program communicates. Reports show the lines that call
            them. The modules of well-known frameworks are included by default.
        device: the type of device that the pytest fixture ``device`` returns on ranks: ``cpu`` or ``cuda``. The device
            must be available. Ranks may send tensors of both types.
        cuda_as_cpu: run the CUDA code of the ranks on the CPU; see docs/cuda-as-cpu.md.
        timeout_s: the time limit of one call, in seconds. A call in which a rank takes longer raises ``RankTimeout``.
            The attribute may be changed between calls.

    Raises:
        ValueError: a module of ``own_globals`` cannot be imported. Raised when ranks are opened.

    Example:
        >>> import torch, torch.distributed as dist
        >>> def total():
        ...     x = torch.tensor([dist.get_rank() + 1.0])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> SimulatedWorld().run(total, world_size=4)
        [10.0, 10.0, 10.0, 10.0]
    """

    name = "sim"
    isolation = "fresh"  # new threads cost almost nothing
    shares_process = True

    def __init__(
        self,
        *,
        seed: int = 0,
        schedule: str | Schedule = "random",
        semantics: Semantics | str = "rendezvous",
        faults: Sequence[Fault] = (),
        topology: Topology | None = None,
        timeline: bool = False,
        own_globals: Sequence[str] = (),
        comm_wrappers: Sequence[str] = (),
        device: str = "cpu",
        cuda_as_cpu: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self.seed = seed
        self.device = choose_device(self.name, device)
        self.cuda_as_cpu = cuda_as_cpu
        self.timeout_s = timeout_s
        self.until: float | None = None  # if set, replaces timeout_s: when all calls end, on the monotonic clock
        self.own_globals = check_names("own_globals", own_globals)
        self.comm_wrappers = check_names("comm_wrappers", comm_wrappers)
        self._own_modules: RankLocalModules | None = None
        self.semantics = make_semantics(semantics)
        self.faults = check_faults(faults)
        self._release: finalize[..., SimulatedWorld] | None = None
        self.measures = Measures(topology, timeline)
        self.schedule = schedule_of(schedule, seed=seed) if isinstance(schedule, str) else schedule

    def __repr__(self) -> str:
        is_default, name = self.semantics == Semantics(), self.semantics.name
        semantics = "" if is_default else f", semantics={repr(name) if name else self.semantics}"
        faults = f", faults={list(self.faults)}" if self.faults else ""
        topology = f", topology={self.measures.topology}" if self.measures.topology is not None else ""
        own = f", own_globals={list(self.own_globals)}" if self.own_globals else ""
        device = f", device={self.device!r}" if self.device != "cpu" else ""
        cuda = ", cuda_as_cpu=True" if self.cuda_as_cpu else ""
        options = f"{semantics}{faults}{topology}{own}{device}{cuda}"
        return f"{type(self).__name__}(seed={self.seed}, schedule={str(self.schedule)!r}{options})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(NOT_SENT)

    @property
    def traffic(self) -> Traffic:
        """Return the bytes and messages of this world's last run, whether it succeeded or failed.

        The last run is the last :meth:`run`, or the last call on ranks of :meth:`open`. Each run starts from zero.

        Raises:
            RuntimeError: there was no run yet.
        """
        return self.measures.traffic

    @property
    def timeline(self) -> Timeline:
        """Return what each rank of the last run did, and when, in virtual time. A failed run has a timeline too.

        Raises:
            Unsupported: the world was made with neither ``topology`` nor ``timeline``.
            RuntimeError: there was no run yet.
        """
        return self.measures.timeline

    def check(self) -> None:
        """See :class:`pdlcheck.worlds.protocol.World`."""
        if self.device == "cuda" and not self.cuda_as_cpu and (why := why_no_cuda()):
            cure = f"install {CUDA_CURE}"
            raise WorldUnavailable(f"ranks of {self.name} on CUDA: {why}; {cure}", world=self.name, cure=cure)

    def own_modules(self) -> RankLocalModules | None:
        """Return the modules whose globals each rank has for itself; None if there are none."""
        names = (*self.own_globals, *known_own_globals())
        if self._own_modules is None or self._own_modules.names != names:
            self._own_modules = RankLocalModules(names)
        return self._own_modules if names else None

    def run(self, fn: Callable[..., Any], /, *args: Any, world_size: int, **kwargs: Any) -> list[Any]:
        """See :class:`pdlcheck.worlds.protocol.World`."""
        __tracebackhide__ = True
        with self.open(world_size) as ranks:
            return ranks.run(fn, *args, **kwargs)

    @contextmanager
    def open(self, world_size: int) -> Iterator[SimulatedRanks]:
        """Start ``world_size`` ranks, and keep them with their process group while the block runs."""
        check_world_size(world_size)
        self.check()
        self.measures.check(world_size, self.faults)
        if current_rank() is not None:
            raise RuntimeError(INSIDE.format("simulated rank"))
        me = threading.get_ident()
        if me in _open_clusters:
            raise RuntimeError("a simulated cluster is open in this thread already; use that one, or close it first")
        with ExitStack() as stack:
            stack.enter_context(_one_cluster_at_a_time)
            stack.callback(_open_clusters.discard, me)
            _open_clusters.add(me)
            self._hold_process()
            stack.enter_context(rank_local_torch_distributed())
            declare_wrappers(self.comm_wrappers)
            if self.cuda_as_cpu:
                from pdlcheck.worlds.cuda_as_cpu.exchange import exchanged  # imports FSDP, which few runs need

                stack.enter_context(exchanged(_devices_of_thread))
            ranks = SimulatedRanks(world_size, self)
            stack.callback(ranks.close)
            yield ranks

    def limit(self) -> float | None:
        """Return the time limit, in seconds, of a call that begins now; None if it has none."""
        if self.until is None:
            return self.timeout_s
        return max(round(self.until - time.monotonic(), 1), LEAST_LIMIT_S)

    def _hold_process(self) -> None:
        """Keep what is exchanged in this process until this world, and every other one, is closed or forgotten."""
        if id(self) not in _holders:
            _holders.add(id(self))
            self._release = finalize(self, _give_process_back, id(self))
            self._release.atexit = False

    def suspend(self) -> None:
        """Take back what simulated ranks exchange in this process, until ranks are opened again; for other tests."""
        IN_RANKS.take_back()

    def close(self) -> None:
        """Take back what is exchanged in this process, if no other simulated world is open. It may be used again."""
        if self._release is not None:
            self._release()


def _compute(engine: SimulatedEngine, rank: int, seconds: float) -> None:
    for observe in engine.events.computed:
        observe(rank, seconds)


def _give_process_back(holder: int) -> None:
    _holders.discard(holder)
    if not _holders:
        IN_RANKS.take_back()


class SimulatedRanks:
    """Open ranks that serve several runs. After a failure they get a new process group."""

    def __init__(self, world_size: int, world: SimulatedWorld) -> None:
        self.world_size = world_size
        self._world = world
        self.intact = True  # until the ranks are closed, because lost ranks are replaced
        self._broken_off = False
        self._make_own_groups = False
        self._absent: Sequence[int] = ()  # ranks that never come in the run under way
        self._without: set[int] = set()  # ranks that have started without a group
        self._own_modules = world.own_modules()
        self._devices = self._new_devices()
        self._known = known_own_globals()
        self._serve(rank_pool.take(world_size) or Cluster(world_size))

    def _serve(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._without.clear()
        cluster.serve(self._world.seed, self._world.semantics)
        self._own_globals_anew()

    def _own_globals_anew(self) -> None:
        """Give the ranks new globals of their own, as new processes have them after a failure."""
        if self._own_modules is not None:
            self._own_modules.open((rank.state for rank in self._cluster.scheduler.ranks), self._world.seed)

    def _new_devices(self) -> list[RankDevices | None]:
        """Return the devices of each rank; None for a rank whose CUDA code is not run on the CPU."""
        if not self._world.cuda_as_cpu:
            return [None] * self.world_size
        own = self._world.device == "cuda"
        return [RankDevices(self.world_size, rank if own else 0) for rank in range(self.world_size)]

    def _reset(self) -> None:
        self._cluster.reset()
        self._without.clear()
        self._own_globals_anew()

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """See :class:`pdlcheck.worlds.protocol.Ranks`."""
        __tracebackhide__ = True
        try:
            return results(self.outcomes(fn, *args, **kwargs))
        except BaseException as error:
            add_note(error, f"replay: {self._world!r}")
            raise

    def outcomes(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Outcome]:
        """See :class:`pdlcheck.worlds.protocol.Ranks`."""
        __tracebackhide__ = True
        check_function(fn)
        fn = IN_RANKS.stand_in(fn)  # the caller may have read a function such as time.sleep before it was patched
        if self.world_size > 1 and (warning := import_time_draws.warning_of(fn, self._world.own_globals)) is not None:
            advise(warning, stacklevel=3)

        def body() -> Any:
            __tracebackhide__ = True
            if args or kwargs:
                own_args, own_kwargs = own_copy(fn, args, kwargs)
                value = fn(*own_args, **own_kwargs)
            else:
                value = fn()
            check_has_run(value, running_rank().rank)
            return value if self._own_modules is None else self._own_modules.result(value)

        if OBSERVED.observer is not None:
            OBSERVED.observer.call(fn)
        self._devices = self._new_devices()
        outcomes = self.run_bodies([body] * self.world_size)
        return [_that_ends_nothing(outcome, ENDS_A_PROCESS) for outcome in outcomes]

    def run_bodies(
        self,
        bodies: Sequence[Callable[[], Any]],
        schedule: Schedule | None = None,
        faults: Sequence[Fault] | None = None,
        *,
        keep_groups: bool = False,
        sets_up: bool = False,
    ) -> list[Outcome]:
        """Call ``bodies[r]()`` as rank r, and return the outcomes.

        Args:
            bodies: one function for each rank.
            schedule: replaces the world's schedule.
            faults: replace the world's faults.
            keep_groups: keep the process groups after a failure too, for teardown. A rank that has destroyed its group
                stays without one.
            sets_up: later runs start from the random numbers and the default dtype that this run ends with. With either
                flag, text that a rank has redirected stays redirected after the run.
        """
        __tracebackhide__ = True
        if not self.intact:
            raise RuntimeError(CLOSED)
        if self._broken_off and not keep_groups:
            self._reset()
            self._broken_off = False
        for rank in self._cluster.scheduler.ranks:
            rank.state.begins_here, rank.state.leaves_streams = sets_up, sets_up or keep_groups
        faults = check_faults(self._world.faults if faults is None else faults, self.world_size)
        bodies = [partial(self._as_rank, rank, body, keep_groups) for rank, body in enumerate(bodies)]
        try:
            outcomes = self._run(bodies, schedule or self._world.schedule, faults)
            self._warn_of_late_imports()
            self._warn_of_early_reads()
            for warning in self._cluster.engine.warnings():
                advise(warning, stacklevel=2)
            return [_that_ends_nothing(outcome, (KeyboardInterrupt,)) for outcome in outcomes]
        except Inconclusive:
            if isinstance(faults, DrawnFaults):
                faults.reject()
            raise

    def _warn_of_late_imports(self) -> None:
        """Warn of known modules that were imported during the run, because ranks share their globals.

        Ranks have them for themselves when they are opened again.
        """
        now = known_own_globals()
        late, self._known = [name for name in now if name not in self._known], now
        if late and self.world_size > 1:
            advise(
                f"simulated ranks shared {' and '.join(late)} in this run, which keeps the rank of a process: it was "
                "imported while they ran; import it at the top of the file of the test, and each rank has its own",
                stacklevel=2,
            )

    def _warn_of_early_reads(self) -> None:
        """Warn of globals that a module computed from a rank's variables at import.

        The module was imported in the controller, and simulated ranks share what it computed there.
        """
        if self.world_size > 1 and (reads := import_time_reads.unreported()):
            advise(
                "simulated ranks share what a module makes of a launcher's variables when it is imported, where no "
                f"rank is set: {'; '.join(map(str, reads))}; read them in a function, or run this on processes, with "
                "--world gloo",
                stacklevel=2,
            )

    def leave_group(self) -> None:
        """Start the following runs without a process group. Ranks keep the groups that they make in these runs."""
        self._make_own_groups = True

    def give_to_controller(self, rank: int) -> None:
        """Make the controller adopt the settings that this rank changed in its last run, for all ranks."""
        self._cluster.scheduler.ranks[rank].state.give_to_controller()

    def _as_rank(self, rank: int, body: Callable[[], Any], keep_groups: bool) -> Any:
        __tracebackhide__ = True
        cluster = self._cluster
        if self._absent:
            if rank in self._absent:
                raise RankGone
            join_without_group(cluster.engine, cluster.store)
        elif self._make_own_groups:
            if rank not in self._without:
                join_without_group(cluster.engine, cluster.store)
                self._without.add(rank)
        elif not (has_group() or (keep_groups and has_left_group())):  # first run, or the last one destroyed the group
            join_group(cluster.engine, cluster.store)
        keep_time(partial(_compute, cluster.engine, rank))  # not self: idle threads keep it
        running_rank().devices = devices = self._devices[rank]
        try:
            if devices is None:
                return body()
            with in_mode(devices):
                return body()
        except (KeyError, ValueError) as error:  # torch raises these for an unknown group
            explain_foreign_group(error)
            raise
        finally:
            cluster.leave(rank)

    def _with_faults(self, outcomes: Sequence[Outcome], injector: FaultInjector) -> list[Outcome]:
        """Return the outcomes in which each lost rank has the error of its fault.

        If a survivor failed only because a rank was lost, its outcome is marked as a consequence.

        Raises:
            Inconclusive: all survivors returned, and a fault did not come about.
        """
        gone = injector.gone
        order = {rank: _LATER + number for number, rank in enumerate(gone)}
        if all(isinstance(outcome, Returned) for outcome in outcomes if outcome.rank not in gone):
            for fault in injector.why_not:
                raise Inconclusive(f"{fault} did not come about: {injector.why(fault)}", fault=fault)
            return [Returned(o.rank, gone[o.rank], o.last) if o.rank in gone else o for o in outcomes]
        told: list[Outcome] = []
        for o in outcomes:
            if o.rank in gone:
                told.append(Raised(o.rank, gone[o.rank], order=order[o.rank], last=o.last))
            elif isinstance(o, Raised) and gone and is_consequence(o.error):
                told.append(replace(o, consequence=True, order=2 * _LATER + o.order))
            else:
                told.append(o)
        return told

    def _run(self, bodies: Sequence[Callable[[], Any]], schedule: Schedule, faults: Sequence[Fault]) -> list[Outcome]:
        __tracebackhide__ = True
        if self._own_modules is not None:
            self._own_modules.begin()
        cluster, engine, measures = self._cluster, self._cluster.engine, self._world.measures
        cluster.begin(faults, measures.begin(self.world_size, faults))
        injector = faults_of(engine)
        self._absent = injector.absent
        try:
            try:
                ended = cluster.scheduler.run(bodies, schedule, self._world.limit())
            finally:
                measures.end()
        except BaseException:  # raised by the schedule, or an interrupt
            if cluster.scheduler.given_up:
                self._serve(Cluster(self.world_size))
            else:
                self._reset()
            raise
        if all(isinstance(outcome, Returned) for outcome in ended) and (leaks := engine.verdict()):
            ended[0] = Raised(0, leaks)
        last = {rank: cluster.descriptions.text(signature) for rank, signature in engine.last.items()}
        outcomes = [replace(outcome, last=last.get(outcome.rank, "")) for outcome in ended]
        if not all(isinstance(outcome, Returned) for outcome in outcomes):
            if injector.gone:
                self._reset()
                return self._with_faults(outcomes, injector)
            cluster.break_off()
            self._broken_off = True
        elif faults:
            measures.check_slowed()
            return self._with_faults(outcomes, injector)
        return outcomes

    def close(self) -> None:
        """Keep the rank threads and their group for the next world of this size, or end them if they are not as new."""
        self.intact = False
        rank_pool.keep(self._cluster)


def _devices_of_thread() -> RankDevices | None:
    rank = current_rank() or rank_behind()
    return None if rank is None else rank.devices


def _that_ends_nothing(outcome: Outcome, kinds: tuple[type[BaseException], ...]) -> Outcome:
    """Turn an exception of one of these kinds into a failure of its rank, as on processes. It would end the controller.

    A test framework turns ``sys.exit`` into a failure itself. A real Ctrl-C reaches the controller and no rank.
    """
    if not isinstance(outcome, Raised) or not isinstance(outcome.error, kinds):
        return outcome
    text = "".join(traceback.format_exception(outcome.error))
    return replace(outcome, error=as_failure(outcome.rank, outcome.error, text))
