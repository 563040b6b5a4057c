"""The registration of the MPI backend with ``torch.distributed``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pdlcheck.compat.patches import Patches
from pdlcheck.compat.torch.rendezvous import HANDLERS
from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds import handles, jit_wait
from pdlcheck.worlds.mpi.job import CURE
from pdlcheck.worlds.mpi.names import BACKEND, SCHEME

__all__ = ["BACKEND", "register"]

Place = tuple[Store, int, int]


def register() -> None:
    """Register the backend with torch; a second call does nothing.

    ``init_method="mpi://"`` takes rank and world size from MPI. So does the default, ``env://``, if no launcher has set
    torch's variables and MPI has several ranks.
    """
    if BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    Patches([*handles.PATCHES, *jit_wait.PATCHES]).put_for_good()
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of the same name
    rendezvous.register_rendezvous_handler(SCHEME, _from_mpi)
    if HANDLERS.is_there() and "env" in (handlers := HANDLERS.value):
        handlers["env"] = _environment_or_mpi(handlers["env"])


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    try:
        from pdlcheck.worlds.mpi.group import create  # imports MPI, which may not be installed
    except ImportError as error:
        raise WorldUnavailable(
            f"the backend {BACKEND} needs mpi4py and an MPI library ({error}); {CURE}", world="mpi", cure=CURE
        ) from error
    return create(options)


def _from_mpi(url: str, timeout: timedelta = dist.default_pg_timeout, **kwargs: Any) -> Iterator[Place]:
    from pdlcheck.worlds.mpi.rendezvous import meet

    yield meet(timeout)
    raise RuntimeError("mpi:// cannot be used for a second rendezvous")


def _environment_or_mpi(environment: Any) -> Any:
    def handler(url: str, **kwargs: Any) -> Any:
        if "rank=" in url or "RANK" in os.environ or not _is_under_mpi():
            return environment(url, **kwargs)
        return _from_mpi(url, **kwargs)

    return handler


def _is_under_mpi() -> bool:
    try:
        from pdlcheck.worlds.mpi import library
    except ImportError:
        return False
    library.start()
    return library.MPI.COMM_WORLD.Get_size() > 1
