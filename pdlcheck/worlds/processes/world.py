"""Ranks as processes of this machine."""

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
from pdlcheck.worlds.arguments import check_names, check_world_size
from pdlcheck.worlds.backends import backend_of
from pdlcheck.worlds.devices import CUDA_CURE, check_cuda_as_cpu, check_devices, choose_device, why_no_cuda
from pdlcheck.worlds.isolation import check_isolation
from pdlcheck.worlds.processes.controller import forkserver
from pdlcheck.worlds.processes.controller.local import LocalPlacement
from pdlcheck.worlds.processes.rank.own_rank import runs_users_code
from pdlcheck.worlds.protocol import INSIDE, NOT_SENT

if TYPE_CHECKING:
    from pdlcheck.worlds.processes.controller.placement import Placement
    from pdlcheck.worlds.processes.controller.pool import Pool
    from pdlcheck.worlds.processes.controller.setup import Setup
    from pdlcheck.worlds.processes.controller.templates import Beginning, KeptTemplates, Templates
    from pdlcheck.worlds.processes.ranks import ProcessRanks

__all__ = ["ProcessWorld"]

_A_LONG_TIME_S = 10 * 24 * 3600.0


class ProcessWorld:
    """Runs functions on local processes that are started once for each world size and kept between calls.

    The ranks have a real process group over loopback. They share nothing with the controller: the function,
    its arguments and its result travel by value (cloudpickle), so lambdas, closures and notebooks work.

    Args:
        backend: of the default group: ``gloo``; ``mpi``, for which mpiexec is run here; ``nccl``, whose ranks have a
            CUDA device each; or another one of this torch.
        name: of the world; default: that of the backend.
        device: ``cuda``: the current device of a machine's rank ``r`` is its CUDA device ``r``, modulo their number, so
            ranks of gloo can share one. ``cpu``: no rank touches CUDA. Default: ``cuda`` for nccl, else ``cpu``.
        cuda_as_cpu: run the CUDA code of the ranks on the CPU; see docs/cuda-as-cpu.md. Not for nccl.
        threads_per_rank: of torch's operations; default: the cores, shared out among the ranks.
        timeout_s: a call in which some rank takes longer fails with ``RankTimeout``; may be set anew between calls.
        watch: compare what the ranks post before it goes to the real group, so a mismatch or a
            deadlock is an exception instead of an abort or a hang. False pays nothing for it.
        take_turns: let the threads of a rank take no core from one another (``SCHED_BATCH``); without it gloo's times
            on few cores differ from run to run, see docs/findings/gloo_polls.md. ``None``: as ``watch``.
        seed: the random streams of the ranks start from it, on each rank differently, anew for each call.
        placement: where the processes are started; default: on this machine.
        isolation: what :meth:`open` and :meth:`run` share with earlier ones. ``pool``: the processes and their default
            group. ``reinit``: the processes; they leave their groups and join a new default group. ``fresh``: nothing;
            the processes are started and ended.
        prepare: called on every rank before its first call, such as to start a measurement; what it registers
            with ``atexit`` is called when the world is closed.
        debugged: a rank in which a person uses a debugger: no time limit holds, and it is not stopped when
            another rank fails.
        comm_wrappers: modules, or packages, through which the program communicates: reports show the lines that call
            them. Those of well-known frameworks are known.

    Raises:
        WorldUnavailable: at the first use: torch lacks the backend or the device, or the system cannot fork.
        WorldTooSmall: at the first use of so many ranks: nccl has too few devices for them.

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
        self.timeout_s = timeout_s if debugged is None else _A_LONG_TIME_S
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
        """See :class:`pdlcheck.worlds.protocol.World`."""
        __tracebackhide__ = True
        with self.open(world_size) as ranks:
            return ranks.run(fn, *args, **kwargs)

    @contextmanager
    def open(
        self, world_size: int, *, beginning: Beginning | None = None, begun: object = None
    ) -> Iterator[ProcessRanks]:
        """See :class:`pdlcheck.worlds.protocol.World`; processes that are there already are used again.

        Fresh ranks of which the ``beginning`` is known are forks of processes that have done it, where that can be:
        the ranks' ``have_begun`` is then True. A call that was begun on kept ranks with another key than ``begun`` is
        waited for, and its outcomes are dropped.
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
            from pdlcheck.worlds.processes.ranks import ProcessRanks  # it imports torch: see check

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
        """See :class:`pdlcheck.worlds.protocol.World`."""
        raise Unsupported(f'{self.name} does not count what its ranks send; use get_world("sim")')

    @property
    def timeline(self) -> NoReturn:
        """See :class:`pdlcheck.worlds.protocol.World`."""
        raise Unsupported(f'{self.name} has no virtual clock; use get_world("sim", topology=Topology(intra=Link(...)))')

    def running(self) -> list[int]:
        """The world sizes of which processes run now that serve the next call, too."""
        return [world_size for world_size, pool in self._pools.items() if pool.is_usable and not pool.is_worn]

    def pids(self, world_size: int) -> list[int]:
        """The process ids of the ranks, in rank order; starts them if need be."""
        with self.open(world_size) as ranks:
            return ranks.pids

    def close(self) -> None:
        """End all processes of this world. It may be used again; it then starts new ones.

        The end of the last reference ends its ranks, too, but not the fork server, which other worlds may use.
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
        from pdlcheck.worlds.processes.controller.pool import Pool  # it imports torch: see check
        from pdlcheck.worlds.processes.ranks import ProcessRanks

        placement = self._placement or self._backend.local_placement(forkserver.retain(self))
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
        """None where ranks cannot be forked from templates."""
        if (
            not self._backend.forks_templates
            or self.device != "cpu"
            or self._placement is not None
            or self._debugged is not None
        ):
            return None
        self.check()
        from pdlcheck.worlds.processes.controller.pool import Pool  # it imports torch: see check
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
        except WorldUnavailable:  # a template has ended: ranks can be started without it
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
        """See :class:`pdlcheck.worlds.protocol.World`."""
        if self._is_checked:
            return
        server = forkserver.retain(self)  # it imports torch while this process does
        try:
            if not server.alive:
                why = f"the fork server of {self.name} has ended"
                raise WorldUnavailable(f"{why}; {self._backend.cure}", world=self.name, cure=self._backend.cure)
            self._backend.check()
            if self.device == "cuda" and not self.cuda_as_cpu and (why := why_no_cuda()):
                cure = f"install {CUDA_CURE}"
                raise WorldUnavailable(f"ranks of {self.name} on CUDA: {why}; {cure}", world=self.name, cure=cure)
        except WorldUnavailable:
            forkserver.release(self)
            raise
        self._is_checked = True

    def _abandon(self) -> None:
        for pool in self._pools.values():
            pool.abandon()
        self._pools.clear()
        if self._templates is not None:
            self._templates.abandon()
        self._one_at_a_time = threading.RLock()


def _is_simulated_rank() -> bool:
    """Whether the caller is one; who has not imported their world is none."""
    scheduler = sys.modules.get("pdlcheck.worlds.simulated.turns.scheduler")
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
        world._abandon()


_worlds: weakref.WeakSet[ProcessWorld] = weakref.WeakSet()
atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
