"""What a rank does in another way on one backend of torch.distributed than on the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdlcheck.worlds.processes.rank.coordinator import OperationCoordinator
from pdlcheck.worlds.processes.rank.own_device import own_device

__all__ = ["group_arguments", "watch"]


def watch(backend: str, coordinator: OperationCoordinator) -> None:
    """Make every group of this backend a watched group; a rank calls this before it joins a group."""
    _WATCHES[backend](coordinator)


def group_arguments(backend: str) -> dict[str, Any]:
    """Return the arguments of ``init_process_group`` for the default group; a rank calls this."""
    return _ARGUMENTS[backend]() if backend in _ARGUMENTS else {"backend": backend}


def _watch_gloo(coordinator: OperationCoordinator) -> None:
    from pdlcheck.worlds.processes.rank.watched_gloo import watch_gloo

    watch_gloo(coordinator)


def _watch_mpi(coordinator: OperationCoordinator) -> None:
    from pdlcheck.worlds.processes.rank.watched_mpi import watch_mpi  # it imports MPI

    watch_mpi(coordinator)


def _of_mpi() -> dict[str, Any]:
    import pdlcheck.worlds.mpi as mpi  # importing it registers the backend

    return {"backend": mpi.BACKEND}


def _of_nccl() -> dict[str, Any]:
    # With a device id, NCCL connects at once. An unusable device then raises here, not in the first test.
    return {"backend": "nccl", "device_id": own_device()}


_WATCHES: dict[str, Callable[[OperationCoordinator], None]] = {"gloo": _watch_gloo, "mpi": _watch_mpi}
_ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {"mpi": _of_mpi, "nccl": _of_nccl}
