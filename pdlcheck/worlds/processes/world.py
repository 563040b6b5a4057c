"""The process world: ranks are processes of this machine."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from pdlcheck.errors import Unsupported, WorldUnavailable
from pdlcheck.time_budgets import DEBUGGER_S
from pdlcheck.worlds.arguments import check_names, check_world_size
from pdlcheck.worlds.backends import backend_of
from pdlcheck.worlds.devices import CUDA_CURE, check_cuda_as_cpu, check_devices, choose_device, why_no_cuda
from pdlcheck.worlds.isolation import check_isolation
from pdlcheck.worlds.processes.controller import forkserver
from pdlcheck.worlds.processes.controller.local import LocalPlacement
from pdlcheck.worlds.processes.controller.local_placements import local_placement
from pdlcheck.worlds.processes.rank.own_rank import runs_users_code
from pdlcheck.worlds.protocol import INSIDE, NOT_SENT

if TYPE_CHECKING:
    from pdlcheck.worlds.processes.controller.placement import Placement
    from pdlcheck.worlds.processes.controller.pool import Pool
    from pdlcheck.worlds.processes.controller.setup import Setup
    from pdlcheck.worlds.processes.controller.templates import Beginning, KeptTemplates, Templates
    from pdlcheck.worlds.processes.ranks import ProcessRanks

__all__ = ["ProcessWorld"]


class ProcessWorld:
    """A world whose ranks are local processes, started once for each world size and kept between calls.

    The ranks have a real process group over loopback. They share nothing with the controller. The function, its
    arguments and its result travel by value (cloudpickle), so lambdas, closures and notebooks work.

    Args:
        backend: the backend of the default group: ``gloo``; ``mpi``, which runs mpiexec on this machine; ``nccl``,
            which gives each rank its own CUDA device; or another backend of this torch.
        name: the name of the world; default: the name of the backend.
        device: ``cuda``: the current device of a machine's rank ``r`` is CUDA device ``r`` modulo the number of
            devices, so ranks of gloo can share a device. ``cpu``: no rank uses CUDA. Default: ``cuda`` for nccl, else
            ``cpu``.
        cuda_as_cpu: run the CUDA code of the ranks on the CPU; see docs/cuda-as-cpu.md. Not for nccl.
        threads_per_rank: the number of threads for torch's operations; default: the cores, divided among the ranks.
        timeout_s: the time limit of a call; the call fails with ``RankTimeout`` if a rank takes longer. It may be
            changed between calls.
        watch: compare the ranks' operations before the real group gets them. A mismatch or a deadlock is then an
            exception instead of an abort or a hang. ``False`` avoids the cost of this comparison.
        take_turns: use ``SCHED_BATCH``, so that the threads of a rank take no core from one another. Without it, gloo's
            times on few cores differ from run to run; see docs/findings/gloo_polls.md. ``None``: the value of
            ``watch``.
        seed: the random streams of the ranks start from it, differently on each rank, anew for each call.
        placement: starts the processes; default: on this machine.
        isolation: the state that :meth:`open` and :meth:`run` share with earlier ones. ``pool``: the processes and
            their default group. ``reinit``: the processes; they leave their groups and join a new default group.
            ``fresh``: nothing; the processes are started and ended.
        prepare: called on every rank before its first call, for example to start a measurement. Functions that it
            registers with ``atexit`` are called when the world is closed.
        debugged: a rank in which a person uses a debugger. No time limit holds, and this rank is not stopped when
            another rank fails.
        comm_wrappers: modules or packages through which the program communicates; reports show the lines that call
            them. Those of well-known frameworks are included.

    Raises:
        WorldUnavailable: at the first use, if torch lacks the backend or the device, or if the system cannot fork.
        WorldTooSmall: at the first use of a world size for which nccl has too few devices.

    Example:
        >>> import torch, torch.distributed as dist
        >>> def total():
        ...     x = torch.tensor([dist.get_rank() + 1.0])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> world = ProcessWorld()
        >>> world.run(total, world_size=2)
        [3.0, 3.0]
        >>> world.close()
    """

    shares_process = False

    @property
    def is_placed(self) -> bool:
        """Return True if a placement starts the processes: they may be on other nodes."""
        return self._placement is not None

    def __init__(
        self,
        backend: str = "gloo",
        *,
        name: str = "",
        device: str | None = None,
        cuda_as_cpu: bool = False,
        threads_per_rank: int | None = None,
        timeout_s: float = 60.0,
        watch: bool = True,
        take_turns: bool | None = None,
        seed: int = 0,
        placement: Placement | None = None,
        isolation: str = "pool",
        prepare: Callable[[], None] | None = None,
        debugged: int | None = None,
        comm_wrappers: Sequence[str] = (),
    ) -> None:
        if threads_per_rank is not None and threads_per_rank < 1:
            raise ValueError(f"threads_per_rank must be at least 1, got {threads_per_rank}; pass None for the default")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}; pass seconds, such as 60.0")
        self.name = name or backend
        self._backend = backend_of(backend)
        self.device = choose_device(backend, device)
        self.cuda_as_cpu = check_cuda_as_cpu(backend, cuda_as_cpu)
        self.seed = seed
        self._threads = threads_per_rank
        self.timeout_s = timeout_s if debugged is None else DEBUGGER_S
        self._prepare = prepare
        self._debugged = debugged
        self._comm_wrappers = check_names("comm_wrappers", comm_wrappers)
        self._watch = watch
        self._take_turns = take_turns
        self._placement = placement
        self.isolation = check_isolation(isolation)
        self._pools: dict[int, Pool] = {}
        self._templates: KeptTemplates | None = None
        self._one_at_a_time = threading.RLock()
        self._is_checked = False
        _worlds.add(self)
        weakref.finalize(self, _close_pools, self._pools)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, seed={self.seed})"

    def run(self, fn: Callable[..., Any], /, *args: Any, world_size: int, **kwargs: Any) -> list[Any]:
        """Run a function on every rank and return the results; see :class:`pdlcheck.worlds.protocol.World`."""
        __tracebackhide__ = True
        with self.open(world_size) as ranks:
            return ranks.run(fn, *args, **kwargs)

    @contextmanager
    def open(
        self, world_size: int, *, beginning: Beginning | None = None, begun: object = None
    ) -> Iterator[ProcessRanks]:
        """Yield ranks for several calls; see :class:`pdlcheck.worlds.protocol.World`. Running processes are used again.

        If a ``beginning`` is given, fresh ranks are forks of processes that have done it, where this is possible. The
        ranks' ``have_begun`` is then True. If a call with another key than ``begun`` runs on kept ranks, it is waited
        for, and its outcomes are dropped.
        """
        check_world_size(world_size)
        if runs_users_code():
            raise RuntimeError(INSIDE.format("rank"))
        if _is_simulated_rank():
            raise RuntimeError(INSIDE.format("simulated rank"))
        with self._one_at_a_time:
            fresh, rejoin = self.isolation == "fresh", self.isolation == "reinit"
            forked = self._forked_pool(world_size, beginning) if fresh and beginning is not None else None
            pool = forked or (self._new_pool(world_size) if fresh else self._kept_pool(world_size, begun))
            from pdlcheck.worlds.processes.ranks import ProcessRanks  # imports torch; see check

            ranks = ProcessRanks(pool, self.seed, self.timeout_s, rejoin=rejoin, debugged=self._debugged)
            ranks.have_begun = forked is not None
            try:
                yield ranks
            finally:
                ranks.close()
                if fresh and pool.is_usable:
                    pool.close()

    @property
    def traffic(self) -> NoReturn:
        """Raise ``Unsupported``, because this world does not count traffic."""
        raise Unsupported(f'{self.name} does not count what its ranks send; use get_world("sim")')

    @property
    def timeline(self) -> NoReturn:
        """Raise ``Unsupported``, because this world has no virtual clock."""
        raise Unsupported(f'{self.name} has no virtual clock; use get_world("sim", topology=Topology(intra=Link(...)))')

    def running(self) -> list[int]:
        """Return the world sizes whose processes run now and will also serve the next call."""
        return [world_size for world_size, pool in self._pools.items() if pool.is_usable and not pool.is_worn]

    def pids(self, world_size: int) -> list[int]:
        """Return the process ids of the ranks, in rank order; start the ranks if needed."""
        with self.open(world_size) as ranks:
            return ranks.pids

    def anew(self, *, one_hash_seed: bool = False) -> ProcessWorld | None:
        """Return a world like this one with new processes, which have one hash seed if this is requested.

        Return None if the ranks of this world have one hash seed anyway, or are not forked on this machine.
        """
        if self._placement is not None or not self._backend.forks_templates:
            return None
        server = forkserver.retain(self)
        if len(server.pids) == 1:
            return None
        return ProcessWorld(
            self._backend.name,
            device=self.device,
            cuda_as_cpu=self.cuda_as_cpu,
            threads_per_rank=self._threads,
            timeout_s=self.timeout_s,
            watch=self._watch,
            take_turns=self._take_turns,
            seed=self.seed,
            placement=LocalPlacement(server, one_hash_seed=one_hash_seed),
            comm_wrappers=self._comm_wrappers,
        )

    def close(self) -> None:
        """End all processes of this world. The world may be used again; it then starts new processes.

        The end of the last reference also ends the ranks, but not the fork server, which other worlds may use.
        """
        with self._one_at_a_time:
            _close_pools(self._pools)
            if self._templates is not None:
                self._templates.close()
            forkserver.release(self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(NOT_SENT)

    def _kept_pool(self, world_size: int, begun: object) -> Pool:
        pool = self._pools.get(world_size)
        if pool is not None:
            if pool.begun not in (None, begun):
                pool.end(self.timeout_s)
            if pool.is_worn:
                pool.close()
            pool.drop_if_lost()
        if pool is None or not pool.is_usable:
            pool = self._pools[world_size] = self._new_pool(world_size)
        return pool

    def _new_pool(self, world_size: int) -> Pool:
        self.check()
        from pdlcheck.worlds.processes.controller.pool import Pool  # imports torch; see check
        from pdlcheck.worlds.processes.ranks import ProcessRanks

        placement = self._placement or local_placement(self._backend.name, forkserver.retain(self))
        placement.check(world_size)
        if self._backend.device_for_each_rank:
            import torch

            check_devices(placement.ranks_here(world_size), torch.cuda.device_count())
        pool = Pool(self._setup(world_size), placement)
        if self._prepare is not None:
            try:
                ProcessRanks(pool, self.seed, self.timeout_s).run(self._prepare)
            except BaseException:
                pool.kill()
                raise
        return pool

    def _forked_pool(self, world_size: int, beginning: Beginning) -> Pool | None:
        """Return a pool of ranks that are forked from templates; None if that is not possible."""
        if (
            not self._backend.forks_templates
            or self.device != "cpu"
            or self._placement is not None
            or self._debugged is not None
        ):
            return None
        self.check()
        from pdlcheck.worlds.processes.controller.pool import Pool  # imports torch; see check
        from pdlcheck.worlds.processes.controller.templates import KeptTemplates, Templates

        setup, placement = self._setup(world_size), LocalPlacement(forkserver.retain(self))
        calls = [(beginning.fn, beginning.args)]
        if self._prepare is not None:
            calls.insert(0, (self._prepare, ()))

        def make() -> Templates:
            return Templates(setup, placement, calls, self.seed, self.timeout_s)

        self._templates = self._templates or KeptTemplates()
        templates = self._templates.get(beginning.key, world_size, make)
        if templates is None:
            return None
        try:
            return Pool(setup, placement, templates)
        except WorldUnavailable:  # a template has ended; ranks can be started without it
            self._templates.drop(templates)
            return None

    def _setup(self, world_size: int) -> Setup:
        from pdlcheck.worlds.processes.controller.setup import Setup

        watch = self._watch and self._backend.is_watched
        turns = watch if self._take_turns is None else self._take_turns
        wrappers = self._comm_wrappers
        return Setup(
            world_size, self._backend.name, self._threads, watch, turns, self.device, wrappers, self.cuda_as_cpu
        )

    def check(self) -> None:
        """Raise ``WorldUnavailable`` if ranks cannot run here; see :class:`pdlcheck.worlds.protocol.World`."""
        if self._is_checked:
            return
        is_local = self._placement is None or not self._placement.hosts_store  # otherwise no rank is forked here
        try:
            if is_local and not forkserver.retain(self).alive:  # it imports torch while this process does
                why = f"the fork server of {self.name} has ended"
                raise WorldUnavailable(f"{why}; {self._backend.cure}", world=self.name, cure=self._backend.cure)
            self._backend.check()
            if is_local and self.device == "cuda" and not self.cuda_as_cpu and (why := why_no_cuda()):
                cure = f"install {CUDA_CURE}"
                raise WorldUnavailable(f"ranks of {self.name} on CUDA: {why}; {cure}", world=self.name, cure=cure)
        except WorldUnavailable:
            forkserver.release(self)
            raise
        self._is_checked = True

    def abandon(self) -> None:
        """Forget the ranks in a fork of this process, without ending them."""
        for pool in self._pools.values():
            pool.abandon()
        self._pools.clear()
        if self._templates is not None:
            self._templates.abandon()
        self._one_at_a_time = threading.RLock()


def _is_simulated_rank() -> bool:
    """Return whether the caller is a simulated rank; False if the simulated world was never imported."""
    scheduler = sys.modules.get("pdlcheck.worlds.simulated.scheduling.scheduler")
    return scheduler is not None and scheduler.current_rank() is not None


def _close_pools(pools: dict[int, Pool]) -> None:
    for pool in pools.values():
        if pool.is_usable:
            pool.close()
    pools.clear()


def _close_all() -> None:
    for world in list(_worlds):
        world.close()


def _abandon_all() -> None:
    for world in list(_worlds):
        world.abandon()


_worlds: weakref.WeakSet[ProcessWorld] = weakref.WeakSet()
atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
