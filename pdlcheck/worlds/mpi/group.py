"""One rank's end of a process group whose operations MPI carries out."""

# mypy: disable-error-code="override"
# torch declares each method with overloads; see pdlcheck.worlds.observe.group

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import DebugLevel, Store, get_debug_level

from pdlcheck.errors import WorldUnavailable
from pdlcheck.uncompiled import uncompiled
from pdlcheck.worlds.mpi.library import MPI, start
from pdlcheck.worlds.mpi.names import BACKEND
from pdlcheck.worlds.mpi.progress import Progress
from pdlcheck.worlds.observe import Operation, Signature, WatchedGroup
from pdlcheck.worlds.observe.mismatch import mismatch

__all__ = ["MpiGroup", "create", "wrap_groups"]

_progress = Progress()
_in_mpi: dict[int, int] = {}  # rank in the default group -> rank in MPI
_wrap: Callable[[MpiGroup], dist.ProcessGroup] | None = None


class MpiEngine:
    """The engine that carries out the operations of one group."""

    def __init__(self, communicator: MPI.Intracomm, timeout: timedelta) -> None:
        self._communicator: MPI.Intracomm | None = communicator
        self._timeout = timeout
        # torch's own switch (TORCH_DISTRIBUTED_DEBUG=DETAIL) turns the comparison on. Without it, MPI may end in a
        # segmentation fault if sizes differ.
        self._compares = get_debug_level() == DebugLevel.DETAIL and _wrap is None

    def post(self, operation: Operation) -> dist.Work:
        """Post an operation; see :class:`pdlcheck.worlds.observe.Engine`."""
        if self._communicator is None:
            raise RuntimeError(f"the process group was destroyed before {operation.signature}")
        if MPI.Is_finalized():  # MPI itself would end the job
            raise RuntimeError(f"MPI has ended in this process (MPI.Finalize) before {operation.signature}")
        if self._compares and not operation.signature.is_p2p:
            self._compare(operation.signature)
        return _progress.begin(self._communicator, operation, self._timeout)

    def _compare(self, mine: Signature) -> None:
        """Raise on every rank, before data moves, if the operations of the ranks differ."""
        assert self._communicator is not None
        everybody = _progress.call(self._communicator.allgather, mine)
        if error := mismatch(everybody):
            raise error

    def close(self) -> None:
        """Free the communicator."""
        if self._communicator is not None and not MPI.Is_finalized():
            _progress.call(self._communicator.Free)
        self._communicator = None


@uncompiled
class MpiGroup(WatchedGroup):
    """A group that compares no operations and does not look up the caller's line; only the call itself remains."""

    def __init__(self, name: str, rank: int, members: Sequence[int], engine: MpiEngine) -> None:
        super().__init__(name, rank, members, engine, BACKEND)
        self._mpi = engine

    def shutdown(self) -> None:
        """Free the communicator; ``destroy_process_group`` calls this method."""
        self._mpi.close()

    def _line_and_names(self, tensor: Tensor | None) -> tuple[str, tuple[()], str]:
        return "", (), ""  # no comparison needs the caller's line


def wrap_groups(wrap: Callable[[MpiGroup], dist.ProcessGroup]) -> None:
    """Give torch ``wrap(group)`` in place of each group that is created from now on."""
    global _wrap
    _wrap = wrap


def create(options: Any) -> dist.ProcessGroup:
    """Create the group that torch requests; only its members take part."""
    start()
    members = list(options.global_ranks_in_group)
    name = str(options.group_id)
    if not members:
        members = list(range(options.group_size))
        _number(options.store, options.group_rank, members)
    world = MPI.COMM_WORLD
    chosen = world.Get_group().Incl([_in_mpi[rank] for rank in members])
    # The tag depends on the members, not on the name. If only the members create a group, torch's name for it can
    # differ between ranks.
    tag = zlib.crc32(str(members).encode()) % (2**15 - 1)  # MPI guarantees tags up to this value
    communicator = _progress.call(world.Create_group, chosen, tag)
    group = MpiGroup(name, options.group_rank, members, MpiEngine(communicator, options.timeout))
    return group if _wrap is None else _wrap(group)


def _number(store: Store, rank: int, members: Sequence[int]) -> None:
    """Record the MPI rank of each rank of the default group, because a launcher may number them differently."""
    store.set(f"mpi rank of {rank}", str(MPI.COMM_WORLD.Get_rank()))
    there = MPI.COMM_WORLD.Get_size()
    if there < len(members):
        raise WorldUnavailable(
            f"the process group has {len(members)} ranks, MPI has {there}; "
            f"start the program with mpiexec -n {len(members)}",
            world="mpi",
            cure=f"mpiexec -n {len(members)} python ...",
        )
    _in_mpi.clear()
    for member in members:
        _in_mpi[member] = int(store.get(f"mpi rank of {member}"))
