"""A process group that turns every c10d call into an :class:`Operation` and hands it to an engine.

The simulated world's engine moves the data itself. The process world's engine first lets the controller compare the
signatures of the ranks and then makes the same call on the real group. The c10d methods come from the table of
operations, :mod:`pdlcheck.operations.table`.
"""

# mypy: disable-error-code="override"
# torch declares each method with overloads; the calls that reach a group use one form of each

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch import Tensor

from pdlcheck.compat.torch.c10d import device_types, exclude_from_flight_recorder, get_backend, world_state
from pdlcheck.operations.memory_order import memory_orders
from pdlcheck.operations.messages import SEND
from pdlcheck.operations.method import Method
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.posted import tell
from pdlcheck.operations.reductions import reduce_name
from pdlcheck.operations.signature import Name, Signature
from pdlcheck.operations.table import METHODS
from pdlcheck.uncompiled import uncompiled
from pdlcheck.worlds.observe.addresses import checked_tag, global_rank
from pdlcheck.worlds.observe.comm_debug_mode import count
from pdlcheck.worlds.observe.differences import key_among
from pdlcheck.worlds.observe.naming import line_and_names

__all__ = ["Engine", "WatchedGroup"]


class Engine(Protocol):
    """The part of a world that carries operations out."""

    def post(self, operation: Operation) -> dist.Work:
        """Take an operation; return its handle at once."""


class _DtypeNames(dict[torch.dtype, str]):
    """The names of dtypes without the module: ``float32`` for ``torch.float32``."""

    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


def _sparse(tensor: Tensor) -> str:
    """Return ``sparse float32`` and the like, because a sparse tensor and a dense one do not fit together."""
    return f"sparse {_dtype_names[tensor.dtype]}"


_dtype_names = _DtypeNames()
_strided = torch.strided


class WatchedGroup(dist.ProcessGroup):
    """One rank's end of a process group.

    Args:
        name: the group's name, equal on its ranks.
        rank: this rank's number in the group.
        members: global ranks in group order.
        engine: takes the operations.
        backend_name: the name of this group's backend in ``dist.get_backend`` and in messages.
        among: the ranks of the default group that it was made from, if those are not all ranks in order. torch numbers
            the groups of each default group from 0 again, so the name alone is not unique.
    """

    own_devices: tuple[str, ...] = ("cpu",)  # the device types that it accepts if no backend is registered in it

    def __init__(
        self, name: str, rank: int, members: Sequence[int], engine: Engine, backend_name: str, among: str = ""
    ) -> None:
        super().__init__(rank, len(members))  # type: ignore[call-arg]  # the signature for Python subclasses
        self._group_rank = rank
        self._members = tuple(members)
        self._engine = engine
        self._watched_backend = backend_name
        self._watched_name = name
        self._key = key_among(name, among)  # by which the ranks meet
        self.among = among
        self._collectives = self._messages = 0  # the numbers so far

    @property
    def members(self) -> tuple[int, ...]:
        """Return the global ranks in group order: ranks of the world, whatever default group this one belongs to."""
        return self._members

    @property
    def engine(self) -> Engine:
        """Return the engine that takes the operations."""
        return self._engine

    # -- attributes that torch reads ---------------------------------------------------------------

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self._members)

    def rank(self) -> int:
        """Return this rank's number in the group."""
        return self._group_rank

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return self._watched_backend

    @property
    def pg_name(self) -> str:
        """Return the name of the group."""
        return self._watched_name

    @property
    def group_name(self) -> str:
        """Return the name of the group."""
        return self._watched_name

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the devices of its registered backends, or its own; FSDP's state dicts and DCP read this."""
        return device_types.__get__(self) or [torch.device(kind) for kind in self.own_devices]

    def _get_backend(self, device: torch.device) -> Any:
        is_own = device.type in self.own_devices and not device_types.__get__(self)
        return self if is_own else get_backend(self, device)

    def get_group_store(self) -> distributed_c10d.Store:
        """Return the store of the group."""
        store: distributed_c10d.Store = world_state().pg_map[self][1]
        return store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: this class counts the operations."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of operations of this rank, including messages, as gloo counts them."""
        return self._collectives + self._messages

    def __repr__(self) -> str:
        return f"<{self._watched_backend} group {self._watched_name} of ranks {self._members}>"

    supports_splitting = False  # torch reads it from backends; a group without one is its own backend

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Raise: a watched group cannot be split."""
        raise RuntimeError("a watched group cannot be split; make a new_group of the ranks")

    def count_anew(self) -> None:
        """Count operations from 0 again; every rank of the group must do so before the next collective."""
        self._collectives = self._messages = 0

    def end(self, engine: Engine) -> None:
        """Replace the engine: after the end of the run, ``engine`` refuses further operations."""
        self._engine = engine

    # -- one operation -----------------------------------------------------------------------------

    def _line_and_names(self, tensor: Tensor | None) -> tuple[str, tuple[Name, ...], str]:
        """Return the user's line, the names of ``tensor`` on this rank, and the line that called that function.

        The line and the caller are for reports; the names are for the comparison of the order of calls.
        """
        return line_and_names(tensor)

    def post_collective(
        self,
        method: Method,
        parts: Sequence[Part],
        args: tuple[Any, ...],
        *,
        compare: Sequence[Tensor] = (),
        reduce_op: Any = None,
        root: int | None = None,
        splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> dist.Work:
        """Post a collective; see :class:`pdlcheck.operations.method.Group`."""
        kind, members = method.kind, self._members
        rooted = -1 if root is None else global_rank(kind, root, members)
        seq = self._collectives
        self._collectives += 1
        where, names, caller = self._line_and_names(compare[0] if compare else None)
        signature = Signature(  # by position, which is faster; this runs for each operation
            members[self._group_rank],
            kind.name,
            self._key,
            members,
            seq,
            tuple([tuple(t.shape) for t in compare]),
            tuple([_dtype_names[t.dtype] if t.layout is _strided else _sparse(t) for t in compare]),
            memory_orders(compare) if kind.one_order else (),
            reduce_name(reduce_op) if reduce_op is not None else "",
            rooted,
            -1,  # no peer
            0,  # no tag
            splits,
            where,
            names,
            caller,
        )
        tell(signature)
        is_async = getattr(args[-1], "asyncOp", True)  # a field of the options; C++ callers do not set it
        operation = Operation(signature, parts, method, args, reduce_op, is_async)
        count(operation)
        return self._engine.post(operation)

    def post_message(
        self, method: Method, tensor: Tensor, peer: int | None, tag: int, args: tuple[Any, ...]
    ) -> dist.Work:
        """Post a message; see :class:`pdlcheck.operations.method.Group`."""
        kind = method.kind
        where, _, caller = self._line_and_names(None)
        self._messages += 1
        signature = Signature(
            rank=self._members[self._group_rank],
            op=kind.name,
            group=self._key,
            members=self._members,
            shapes=(tuple(tensor.shape),),
            dtypes=(_dtype_names[tensor.dtype],),
            peer=-1 if peer is None else global_rank(kind, peer, self._members),
            tag=checked_tag(kind.name, tag),
            where=where,
            caller=caller,
        )
        tell(signature)
        part = Part([tensor], []) if kind is SEND else Part([], [tensor])
        return self._engine.post(Operation(signature, [part], method, args))


def _add_methods() -> None:
    """Give the class the methods of every operation."""
    for method in METHODS.values():
        setattr(WatchedGroup, method.name, method.of_class())


_add_methods()
exclude_from_flight_recorder(WatchedGroup)
uncompiled(WatchedGroup)  # after all methods are defined
