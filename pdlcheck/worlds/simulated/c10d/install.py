"""The view of ``torch.distributed`` that each rank thread has for itself.

``torch.distributed`` keeps its groups in one module-level ``_world`` object. Its source names replacing that state as
the way to run several ranks in one process. This module replaces the class of the object: the new class returns the
groups of the calling simulated rank, and returns the process's own groups to every other thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported now, because it captures the default group at import

from pdlcheck.compat.patches import Patch, Patches
from pdlcheck.compat.torch.autograd import ENGINE
from pdlcheck.compat.torch.c10d import (
    LOG_ENTRY,
    NEEDED_BY_SIM,
    WorldState,
    log,
    set_thread_isolation,
    unregister_all_groups,
    world_state,
)
from pdlcheck.compat.torch.modes import number_of_dispatch_modes, number_of_function_modes
from pdlcheck.errors import Unsupported
from pdlcheck.worlds import handles, jit_wait
from pdlcheck.worlds.observe import WatchedGroup, among_all, members_of_default
from pdlcheck.worlds.simulated.c10d import groups, meshes, store_patches
from pdlcheck.worlds.simulated.c10d.groups import BACKEND, name_backends
from pdlcheck.worlds.simulated.c10d.monitored import monitored_barrier
from pdlcheck.worlds.simulated.c10d.store import SimulatedStore
from pdlcheck.worlds.simulated.engine.engine import SimulatedEngine
from pdlcheck.worlds.simulated.process_state import profiler_patch, signal_handlers
from pdlcheck.worlds.simulated.process_state.backward import Engine
from pdlcheck.worlds.simulated.process_state.compile_patch import compile_patches
from pdlcheck.worlds.simulated.process_state.device_streams import seed_present
from pdlcheck.worlds.simulated.scheduling import sleep_patch
from pdlcheck.worlds.simulated.scheduling.rank_threads import follow_threads, rank_behind
from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread, current_rank, running_rank

__all__ = [
    "IN_RANKS",
    "has_group",
    "has_left_group",
    "is_pristine",
    "join_group",
    "join_without_group",
    "rank_local_torch_distributed",
    "rebind_to_world",
]

_FIELDS: dict[str, Callable[[], Any]] = {
    "comms": list,
    "default_pg": lambda: None,
    "group_count": int,
    "pg_backend_config": dict,
    "pg_coalesce_state": dict,
    "pg_group_ranks": dict,
    "pg_map": dict,
    "pg_names": dict,
    "pg_to_tag": dict,
    "tags_to_pg": dict,
}


def _self_test() -> None:
    """Raise ``Unsupported`` on a torch that lacks a name this module needs."""
    missing = [one.path for one in NEEDED_BY_SIM if not one.is_there()]
    missing += [f"{one.owner.__name__}.{one.name}" for one in groups.PATCHES if not hasattr(one.owner, one.name)]
    if missing:
        raise Unsupported(
            f"the simulated world does not know torch {torch.__version__}: it lacks {', '.join(missing)}; "
            "use --world gloo, or a torch from the tested range"
        )


_self_test()


def _rank_local(name: str) -> property:
    original = getattr(WorldState, name)

    def get(self: Any) -> Any:
        rank = current_rank() or rank_behind()
        return original.fget(self) if rank is None else rank.c10d[name]

    def set(self: Any, value: Any) -> None:
        rank = current_rank()
        if rank is None:
            original.fset(self, value)
        else:
            rank.c10d[name] = value

    return property(get, set)


_RankLocalWorld = type("_RankLocalWorld", (WorldState,), {n: _rank_local(n) for n in _FIELDS if hasattr(WorldState, n)})


def _waits(wait_in_cpp: Any) -> Any:
    """Return a ``Future.wait`` that gives other ranks their turn, also for futures of C++ (``then``, DDP's join)."""

    @wraps(wait_in_cpp)
    def wait(self: torch.Future[Any]) -> Any:
        rank = current_rank()
        if rank is not None and not self.done():
            rank.engine.wait(self.done, "Future.wait of an asynchronous operation")
        if rank is not None:
            for observe in rank.engine.events.future_waited:
                observe(rank.rank)
        return wait_in_cpp(self)

    return wait


def _reads(original: Any) -> Any:
    """Return a tensor method that reports its read. torch's own method reads the memory past torch's dispatcher."""

    @wraps(original)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rank = current_rank()
        if rank is not None:
            for observe in rank.engine.events.reads:
                observe(rank.rank, self, f"Tensor.{original.__name__}")
        return original(self, *args, **kwargs)

    return read


def _of_this_rank(seed_all: Callable[[Any], torch.Generator]) -> Callable[[Any], torch.Generator]:
    """Return a ``torch.manual_seed`` that seeds the streams of the calling rank, on devices too.

    torch stores the seed for devices that are used later, together with a stack trace. That takes as long as a
    collective.
    """

    @wraps(seed_all)
    def manual_seed(seed: Any) -> torch.Generator:
        if current_rank() is None:
            return seed_all(seed)
        seed_present(int(seed))
        return torch.default_generator.manual_seed(int(seed))

    return manual_seed


def _not_in_ranks(describe: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``_get_msg_dict`` that is empty on ranks.

    torch's function describes a log entry. For a group that the rank is not in, it would raise an error of its own.
    """
    return lambda *args, **kwargs: {} if current_rank() is not None else describe(*args, **kwargs)


def _is_not_of_a_rank(record: object) -> bool:
    return current_rank() is None


_READS = "these read memory past torch's dispatcher, where the hazards of a pending operation are seen"
_SEEDS = "a simulated rank has random streams of its own"
IN_RANKS: Patches = Patches(  # all that is exchanged in the process, while a simulated world is open
    [
        Patch(
            world_state(),
            "__class__",
            lambda real: _RankLocalWorld,
            "each simulated rank has process groups of its own",
        ),
        *groups.PATCHES,
        *meshes.PATCHES,
        *store_patches.PATCHES,
        *handles.PATCHES,
        *jit_wait.PATCHES,
        *profiler_patch.PATCHES,
        *sleep_patch.PATCHES,
        *signal_handlers.PATCHES,
        *compile_patches(lambda: IN_RANKS.put_late()),
        follow_threads(current_rank),
        Patch(torch.Future, "wait", _waits, "a simulated rank that waits gives the other ranks their turn"),
        Patch(ENGINE.owner, ENGINE.attribute, lambda real: Engine(), "backward passes of ranks meet"),
        Patch(torch.Tensor, "numpy", _reads, _READS),
        Patch(torch.Tensor, "tolist", _reads, _READS),
        Patch(torch, "manual_seed", _of_this_rank, _SEEDS),
        Patch(torch.random, "manual_seed", _of_this_rank, _SEEDS),
        Patch(
            LOG_ENTRY.owner,
            LOG_ENTRY.attribute,
            _not_in_ranks,
            "a log entry would ask for a group that the rank is not in",
        ),
    ],
    keep=True,
)


@contextmanager
def rank_local_torch_distributed() -> Iterator[None]:
    """Give each rank thread process groups of its own while the block runs."""
    with IN_RANKS:
        log.addFilter(_is_not_of_a_rank)  # it logs each exception that passes through it, once for each rank
        set_thread_isolation(True)
        try:
            yield
        finally:
            set_thread_isolation(False)
            log.removeFilter(_is_not_of_a_rank)


def has_group() -> bool:
    """Return whether the running rank is in a default group."""
    rank = current_rank()
    assert rank is not None
    return rank.c10d.get("default_pg") is not None


def has_left_group() -> bool:
    """Return whether the code of the running rank has destroyed the group that the rank was given."""
    rank = current_rank()
    assert rank is not None
    return bool(rank.c10d) and rank.c10d["default_pg"] is None


def join_without_group(engine: SimulatedEngine, store: SimulatedStore) -> RankThread:
    """Leave the running rank without any process group, and return the rank."""
    rank = current_rank()
    assert rank is not None
    own = {"store": store, "adopted": True, "joining": False}
    rank.c10d = {name: make() for name, make in _FIELDS.items()} | own
    rank.engine = engine
    unregister_all_groups()
    return rank


def join_group(engine: SimulatedEngine, store: SimulatedStore) -> None:
    """Give the running rank a new default process group on ``engine``."""
    rank = join_without_group(engine, store)
    world_size = len(engine.scheduler.ranks)
    rank.c10d["joining"] = True
    dist.init_process_group(BACKEND, store=store, rank=rank.rank, world_size=world_size)
    rank.c10d["joining"] = False
    rank.c10d["adopted"] = False
    rank.joined = _copied(rank.c10d)


def rebind_to_world(rank: RankThread) -> None:
    """Put a rank that has kept its group into the state in which :func:`join_group` would leave it."""
    rank.c10d["adopted"] = False
    if name_backends(rank):
        rank.joined = _copied(rank.c10d)


def is_pristine() -> bool:
    """Return whether the running rank is in the state in which :func:`join_group` left it.

    It then has the groups that it was given and no others, and no mode of torch is active in its thread.
    """
    rank = current_rank()
    assert rank is not None
    modes = (
        not torch.is_grad_enabled()  # covers inference mode as well
        or torch.is_autocast_enabled("cpu")
        or number_of_dispatch_modes()
        or number_of_function_modes()
    )
    return not modes and rank.c10d | {"adopted": False} == rank.joined


def _copied(value: Any) -> Any:
    """Return the same groups in new containers."""
    if isinstance(value, dict):
        return {key: _copied(held) for key, held in value.items()}
    return list(value) if isinstance(value, list) else value


class SimulatedGroup(WatchedGroup):
    """One rank's end of a simulated group."""

    own_devices = ("cpu", "cuda")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Run ``dist.monitored_barrier`` on this group."""
        monitored_barrier(self, timeout, wait_all_ranks)


def _create(options: Any, backend_options: Any) -> WatchedGroup:
    if current_rank() is None and rank_behind() is None:
        raise Unsupported('backend "sim" exists inside a simulated world: pdlcheck.worlds.get_world("sim").run(...)')
    me = running_rank()
    default = me.c10d["default_pg"]
    if default is None:
        members = list(range(options.group_size))
        if not me.c10d["joining"]:
            members = members_of_default(options.store, options.group_rank, options.group_size, me.rank)
        among = among_all(members, len(me.engine.scheduler.ranks))
    else:
        members, among = [default.members[place] for place in options.global_ranks_in_group], default.among
    return SimulatedGroup(str(options.group_id), options.group_rank, members, me.engine, BACKEND, among)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
