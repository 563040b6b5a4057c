"""What ``init_process_group`` of a program may ask for where its rank has a default group already.

torch itself checks the arguments: its own function runs until it would meet the other processes, with stores that meet
no other process, and ends there. So the arguments that this version of torch refuses are refused, with its words.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, Store

from pdlcheck.worlds.cuda_as_cpu.devices import devices_of_caller

__all__ = ["rank_by_rendezvous", "require_known", "require_own", "require_valid"]

_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # as an attribute it is a function
_BUILT_IN = ("env", "file", "tcp")  # a handler of the user's own may wait for other processes
# as torch made them: worlds exchange some
_as_torch_made_them: dict[str, Any] = {
    name: getattr(c10d, name) for name in ("_get_default_timeout", "_new_process_group_helper")
}
_meet, _create_store = _rendezvous.rendezvous, _rendezvous._create_c10d_store


def require_known(backend: Any) -> None:
    """Refuse a backend that torch neither has nor was given, as it does itself; of the others each will do.

    Raises:
        AssertionError: the type that torch raises.
    """
    name = str(backend or dist.Backend.UNDEFINED).lower()
    if name in dist.Backend.backend_list:
        return
    for one in [pair.rpartition(":")[2] for pair in name.split(",")] if ":" in name else [name]:
        if one not in dist.Backend.backend_list:
            known = ", ".join(dist.Backend.backend_list[1:])  # the first is none
            raise AssertionError(f"Unknown backend type {one}; there are {known}, and what register_backend adds")


def require_own(asked: Mapping[str, int], rank: int, world_size: int) -> None:
    """Refuse another rank or world size; the world has chosen the backend."""
    for name, own in (("rank", rank), ("world_size", world_size)):
        if asked.get(name, -1) not in (-1, own):
            raise ValueError(f"init_process_group({name}={asked[name]}) on a rank whose {name} is {own}")


def require_valid(
    init: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any], rank: int, world_size: int
) -> None:
    """Check the arguments of a call of ``init_process_group`` on a rank that has a default group.

    Args:
        init: torch's function.
        args, kwargs: of the call.
        rank, world_size: of the default group.

    Raises:
        The error that torch raises for these arguments.
        ValueError: they name another rank or world size than the rank has.
    """
    init = inspect.unwrap(init)  # without torch's log of errors
    given = inspect.signature(init).bind(*args, **kwargs)
    require_known(given.arguments.get("backend"))
    device = given.arguments.get("device_id")
    if devices_of_caller() is not None and (isinstance(device, int) or (device is not None and device.type == "cuda")):
        del given.arguments["device_id"]  # where CUDA code runs on the CPU, torch does not know the devices of a rank
    if given.arguments.get("timeout") is None:
        given.arguments["timeout"] = c10d.default_pg_timeout  # torch warns where it has to look for NCCL's
    found: dict[str, int] = {name: given.arguments.get(name, -1) for name in ("rank", "world_size")}
    with _nothing_is_made(found), suppress(_Valid):
        init(*given.args, **given.kwargs)
    require_own(found, rank, world_size)


class _Valid(BaseException):
    """Torch has found nothing wrong."""


class _Checked(c10d.BackendConfig):
    """The last argument that torch checks; next it would make the backends."""

    def get_device_backend_map(self) -> Any:
        raise _Valid


@contextmanager
def _nothing_is_made(found: dict[str, int]) -> Iterator[None]:
    """In the block this rank has no default group, and torch's function makes none.

    ``found`` takes the rank and world size that an address or the environment names.
    """

    def meet(url: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        if (own := rank_by_rendezvous(url, *args, **kwargs)) is not None:
            found["rank"], found["world_size"] = own
        yield HashStore(), found["rank"], found["world_size"]

    world: Any = c10d._world
    group, count = world.default_pg, world.group_count
    with _exchanged(c10d, _as_torch_made_them | {"BackendConfig": _Checked, "rendezvous": meet}):
        try:
            world.default_pg = None
            yield
        finally:
            world.default_pg, world.group_count = group, count


def rank_by_rendezvous(url: Any, *args: Any, **kwargs: Any) -> tuple[int, int] | None:
    """The rank and the world size of a process that would meet others in this way; it meets none.

    Args:
        url, args, kwargs: as torch's ``rendezvous`` takes them.

    Returns:
        None for a way that is not torch's own.

    Raises:
        The error that torch raises for these arguments.
    """
    with _exchanged(_rendezvous, {"FileStore": _store, "TCPStore": _store, "_create_c10d_store": _create_store}):
        meeting = _meet(url, *args, **kwargs)
        if str(url).partition("://")[0] not in _BUILT_IN:
            return None
        _, rank, world_size = next(meeting)
    return rank, world_size


@contextmanager
def _exchanged(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _store(*args: Any, timeout: timedelta = c10d.default_pg_timeout, **kwargs: Any) -> Store:
    """Stands for a store at an address or in a file.

    Raises:
        DistNetworkError: the time limit is over before it begins.
    """
    if timeout <= timedelta(0):
        raise dist.DistNetworkError(
            f"init_process_group has a timeout of {timeout.total_seconds():g} s: no store is reached in this time; "
            "pass a positive timedelta"
        )
    return HashStore()
