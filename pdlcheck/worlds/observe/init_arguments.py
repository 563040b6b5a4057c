"""The check of a program's ``init_process_group`` call on a rank that already has a default group.

torch itself checks the arguments. Its own function runs, with stores that meet no other process, and stops where it
would meet the other processes. So pdlcheck refuses the arguments that this version of torch refuses, with its messages.
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
from torch.distributed.distributed_c10d import Store

from pdlcheck.compat.torch.c10d import DEFAULT_TIMEOUT, NEW_GROUP, HashStore, world_state
from pdlcheck.compat.torch.rendezvous import CREATE_STORE
from pdlcheck.worlds.rank_devices import devices_of_caller

__all__ = ["rank_by_rendezvous", "require_known", "require_own", "require_valid"]

_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the attribute of that name is a function
_BUILT_IN = ("env", "file", "tcp")  # a user's own handler may wait for other processes
# torch's own functions, because worlds replace some of them
_as_torch_made_them: dict[str, Any] = {one.attribute: one.value for one in (DEFAULT_TIMEOUT, NEW_GROUP)}
_meet: Any = _rendezvous.rendezvous
_stores: dict[str, Any] = {CREATE_STORE.attribute: CREATE_STORE.value}


def require_known(backend: Any) -> None:
    """Raise, as torch does, for a backend that is neither built in nor registered; any other backend is accepted.

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
    """Raise if the call asks for another rank or world size than the rank has.

    The world has chosen the backend already.

    Args:
        asked: the ``rank`` and ``world_size`` of the call; -1 for none.
        rank: the rank.
        world_size: its number of ranks.
    """
    for name, own in (("rank", rank), ("world_size", world_size)):
        if asked.get(name, -1) not in (-1, own):
            raise ValueError(f"init_process_group({name}={asked[name]}) on a rank whose {name} is {own}")


def require_valid(
    init: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any], rank: int, world_size: int
) -> None:
    """Check the arguments of a call of ``init_process_group`` on a rank that has a default group.

    Args:
        init: torch's function.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        rank: the rank in the default group.
        world_size: the number of ranks in the default group.

    Raises:
        Exception: the error that torch raises for these arguments.
        ValueError: they name another rank or world size than the rank has.
    """
    init = inspect.unwrap(init)  # without torch's log of errors
    given = inspect.signature(init).bind(*args, **kwargs)
    require_known(given.arguments.get("backend"))
    device = given.arguments.get("device_id")
    if devices_of_caller() is not None and (isinstance(device, int) or (device is not None and device.type == "cuda")):
        del given.arguments["device_id"]  # where CUDA code runs on the CPU, torch does not know the devices of a rank
    if given.arguments.get("timeout") is None:
        given.arguments["timeout"] = c10d.default_pg_timeout  # torch warns when it has to look up NCCL's
    found: dict[str, int] = {name: given.arguments.get(name, -1) for name in ("rank", "world_size")}
    with _nothing_is_made(found), suppress(_Valid):
        init(*given.args, **given.kwargs)
    require_own(found, rank, world_size)


class _Valid(BaseException):
    """Signal that torch has checked all arguments and found no error."""


class _Checked(c10d.BackendConfig):
    """A backend configuration that stops torch after its last check, before it makes the backends."""

    def get_device_backend_map(self) -> Any:
        raise _Valid


@contextmanager
def _nothing_is_made(found: dict[str, int]) -> Iterator[None]:
    """Remove the default group of this rank during the block, and keep torch's function from making one.

    ``found`` receives the rank and world size that an address or the environment names.
    """

    def meet(url: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        if (own := rank_by_rendezvous(url, *args, **kwargs)) is not None:
            found["rank"], found["world_size"] = own
        yield HashStore(), found["rank"], found["world_size"]

    world = world_state()
    group, count = world.default_pg, world.group_count
    with _exchanged(c10d, _as_torch_made_them | {"BackendConfig": _Checked, "rendezvous": meet}):
        try:
            world.default_pg = None
            yield
        finally:
            world.default_pg, world.group_count = group, count


def rank_by_rendezvous(url: Any, *args: Any, **kwargs: Any) -> tuple[int, int] | None:
    """Return the rank and world size that a rendezvous would give, without meeting another process.

    Args:
        url: the address, as in torch's ``rendezvous``.
        args: further positional arguments of torch's ``rendezvous``.
        kwargs: keyword arguments of torch's ``rendezvous``.

    Returns:
        None for a rendezvous handler that is not torch's own.

    Raises:
        Exception: the error that torch raises for these arguments.
    """
    with _exchanged(_rendezvous, {"FileStore": _store, "TCPStore": _store} | _stores):
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
    """Return a stand-in for a store at an address or in a file.

    Raises:
        DistNetworkError: the time limit is not positive.
    """
    if timeout <= timedelta(0):
        raise dist.DistNetworkError(
            f"init_process_group has a timeout of {timeout.total_seconds():g} s: no store is reached in this time; "
            "pass a positive timedelta"
        )
    return HashStore()
