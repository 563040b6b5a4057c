"""A process group that turns every c10d call into an :class:`Operation` and hands it to an engine.

The simulated world's engine moves the data itself. The process world's engine first lets the controller compare the
signatures of the ranks and then makes the same call on the real group. torch renamed some methods between releases
(``_allgather_base`` became ``all_gather_single``, ...), so both names are defined.
"""

# mypy: disable-error-code="override"
# torch declares each method with overloads; the calls that reach a group use one form of each

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch import Tensor

from pdlcheck.compat.torch.c10d import (
    FLAT_ALL_GATHER,
    FLAT_REDUCE_SCATTER,
    device_types,
    exclude_from_flight_recorder,
    get_backend,
    world_state,
)
from pdlcheck.uncompiled import uncompiled
from pdlcheck.worlds.observe.addresses import checked_tag, global_rank
from pdlcheck.worlds.observe.comm_debug_mode import count
from pdlcheck.worlds.observe.memory_order import orders_between_ranks
from pdlcheck.worlds.observe.naming import Name, line_and_names
from pdlcheck.worlds.observe.operation import Operation, Part
from pdlcheck.worlds.observe.overloads import FORMS, numbers
from pdlcheck.worlds.observe.signature import Signature, key_among

__all__ = ["Engine", "WatchedGroup"]


class Engine(Protocol):
    """The part of a world that carries operations out."""

    def post(self, operation: Operation) -> dist.Work:
        """Take an operation; return its handle at once."""


def _reduce_name(reduce_op: Any) -> str:
    return _reduce_names[reduce_op.__getstate__()[0]]


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
_reduce_names = {kind: name for name, kind in dist.ReduceOp.RedOpType.__members__.items()}


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

    def _post(
        self,
        op: str,
        parts: Sequence[Part],
        method: str,
        args: tuple[Any, ...],
        *,
        compare: Sequence[Tensor] = (),
        reduce_op: Any = None,
        root: int | None = None,
        splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> dist.Work:
        members = self._members
        rooted = -1 if root is None else global_rank(op, root, members)
        seq = self._collectives
        self._collectives += 1
        where, names, caller = self._line_and_names(compare[0] if compare else None)
        signature = Signature(  # by position, which is faster; this runs for each operation
            members[self._group_rank],
            op,
            self._key,
            members,
            seq,
            tuple([tuple(t.shape) for t in compare]),
            tuple([_dtype_names[t.dtype] if t.layout is _strided else _sparse(t) for t in compare]),
            orders_between_ranks(op, compare),
            _reduce_name(reduce_op) if reduce_op is not None else "",
            rooted,
            -1,  # no peer
            0,  # no tag
            splits,
            where,
            names,
            caller,
        )
        is_async = getattr(args[-1], "asyncOp", True)  # a field of the options; C++ callers do not set it
        operation = Operation(signature, parts, method, args, reduce_op, is_async)
        count(operation)
        return self._engine.post(operation)

    def _message(
        self, op: str, tensor: Tensor, peer: int | None, tag: int, method: str, args: tuple[Any, ...]
    ) -> dist.Work:
        where, _, caller = self._line_and_names(None)
        self._messages += 1
        signature = Signature(
            rank=self._members[self._group_rank],
            op=op,
            group=self._key,
            members=self._members,
            shapes=(tuple(tensor.shape),),
            dtypes=(_dtype_names[tensor.dtype],),
            peer=-1 if peer is None else global_rank(op, peer, self._members),
            tag=checked_tag(op, tag),
            where=where,
            caller=caller,
        )
        part = Part([tensor], []) if op == "send" else Part([], [tensor])
        return self._engine.post(Operation(signature, [part], method, args))

    # -- the c10d calls ----------------------------------------------------------------------------

    def allreduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Post an ``all_reduce``."""
        tensors, opts = FORMS["allreduce"].of(args, kwargs)
        return self._in_place("all_reduce", tensors, "allreduce", opts, reduce_op=opts.reduceOp)

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Post an ``all_reduce`` of several tensors."""
        tensors, opts = FORMS["allreduce_coalesced"].of(args, kwargs)
        return self._in_place("all_reduce", tensors, "allreduce_coalesced", opts, reduce_op=opts.reduceOp)

    def broadcast(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Post a ``broadcast``."""
        tensors, opts = FORMS["broadcast"].of(args, kwargs)
        return self._in_place("broadcast", tensors, "broadcast", opts, root=opts.rootRank)

    def reduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Post a ``reduce``."""
        tensors, opts = FORMS["reduce"].of(args, kwargs)
        return self._in_place("reduce", tensors, "reduce", opts, reduce_op=opts.reduceOp, root=opts.rootRank)

    def _in_place(self, op: str, tensors: list[Tensor], method: str, opts: Any, **facts: Any) -> dist.Work:
        parts = [Part([t], [t]) for t in tensors]
        return self._post(op, parts, method, (tensors, opts), compare=tensors, **facts)

    def allgather(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Post an ``all_gather``."""
        outputs, inputs, opts = FORMS["allgather"].of(args, kwargs)
        outputs = [list(out) for out in outputs]
        parts = [Part([x], out) for x, out in zip(inputs, outputs, strict=True)]
        return self._post("all_gather", parts, "allgather", (outputs, inputs, opts), compare=inputs)

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Post an ``all_gather`` of several tensors."""
        # there is one list for each member, with one tensor for each input
        lists, inputs, opts = FORMS["allgather_coalesced"].of(args, kwargs)
        parts = [Part([x], [out[i] for out in lists]) for i, x in enumerate(inputs)]
        return self._post("all_gather", parts, "allgather_coalesced", (lists, inputs, opts), compare=inputs)

    def _gather_flat(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: Any) -> dist.Work:
        parts = [
            Part([x], self._rows(out, x, "all_gather_into_tensor")) for x, out in zip(inputs, outputs, strict=True)
        ]
        return self._post("all_gather", parts, *call, compare=inputs)

    def _rows(self, output: Tensor, input: Tensor, call: str) -> list[Tensor]:
        """Return the part of ``output`` for each rank's input."""
        if output.numel() != self.size() * input.numel():
            raise self._does_not_fit(call, output, input, "an output")
        return list(output.view(self.size(), *input.shape).unbind(0))

    def _does_not_fit(self, call: str, output: Tensor, input: Tensor, larger: str) -> RuntimeError:
        return RuntimeError(
            f"{call} on {self.size()} ranks needs {larger} of {self.size()} times as many elements, got an input of "
            f"{tuple(input.shape)} and an output of {tuple(output.shape)}"
        )

    def gather(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Post a ``gather``."""
        outputs, inputs, opts = FORMS["gather"].of(args, kwargs)
        outputs = [list(out) for out in outputs]
        part = Part(inputs, outputs[0] if outputs else [])
        return self._post("gather", [part], "gather", (outputs, inputs, opts), compare=inputs, root=opts.rootRank)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Post a ``gather`` into one tensor."""
        opts = opts or dist.GatherOptions()
        own = opts.rootRank == self._group_rank  # on other ranks the output is empty and not used
        part = Part([input], self._rows(output, input, "gather_single") if own else [])
        args = (output, input, opts)
        return self._post("gather", [part], "gather_single", args, compare=[input], root=opts.rootRank)

    gather_into_tensor = gather_single  # the names since torch 2.14

    def scatter(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Post a ``scatter``."""
        outputs, inputs, opts = FORMS["scatter"].of(args, kwargs)
        inputs = [list(xs) for xs in inputs]
        part = Part(inputs[0] if inputs else [], outputs)
        return self._post("scatter", [part], "scatter", (outputs, inputs, opts), compare=outputs, root=opts.rootRank)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Post a ``reduce_scatter``."""
        outputs, inputs, opts = FORMS["reduce_scatter"].of(args, kwargs)
        inputs = [list(xs) for xs in inputs]
        parts = [Part(xs, [out]) for xs, out in zip(inputs, outputs, strict=True)]
        call = "reduce_scatter", (outputs, inputs, opts)
        compare = [x for xs in inputs for x in xs]
        return self._post("reduce_scatter", parts, *call, compare=compare, reduce_op=opts.reduceOp)

    def _scatter_flat(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any, call: Any) -> dist.Work:
        for x, out in zip(inputs, outputs, strict=True):
            if x.numel() != self.size() * out.numel():
                raise self._does_not_fit("reduce_scatter_tensor", out, x, "an input")
        parts = [
            Part([piece.view(out.shape) for piece in x.reshape(self.size(), *out.shape).unbind(0)], [out])
            for x, out in zip(inputs, outputs, strict=True)
        ]
        return self._post("reduce_scatter", parts, *call, compare=inputs, reduce_op=opts.reduceOp)

    def alltoall(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Post an ``all_to_all`` with lists of tensors."""
        outputs, inputs, opts = FORMS["alltoall"].of(args, kwargs)
        splits = (tuple(x.numel() for x in inputs), tuple(out.numel() for out in outputs))
        return self._post("all_to_all", [Part(inputs, outputs)], "alltoall", (outputs, inputs, opts), splits=splits)

    def _all_to_all_flat(
        self, output: Tensor, input: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], call: Any
    ) -> dist.Work:
        pieces_in, pieces_out = self._split(input, in_splits), self._split(output, out_splits)
        splits = (tuple(x.numel() for x in pieces_in), tuple(x.numel() for x in pieces_out))
        return self._post("all_to_all", [Part(pieces_in, pieces_out)], *call, splits=splits)

    def _split(self, tensor: Tensor, splits: Sequence[int]) -> list[Tensor]:
        """Return the piece of ``tensor`` for each rank: by rows, or evenly by elements if there are no splits."""
        if splits:
            return list(torch.split(tensor, list(splits)))
        size = self.size()
        if tensor.numel() % size:
            raise RuntimeError(
                f"all_to_all_single without split sizes deals a tensor out evenly: {tensor.numel()} elements, shape "
                f"{tuple(tensor.shape)}, do not divide equally across {size} ranks"
            )
        rows = tensor if tensor.dim() and tensor.shape[0] % size == 0 else tensor.view(-1)
        return list(torch.split(rows, [rows.shape[0] // size] * size))

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Post a ``barrier``."""
        return self._post("barrier", [], "barrier", tuple(FORMS["barrier"].of(args, kwargs)))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Raise: since 2.14 torch does not check the backend's name first, so this call reaches any group."""
        raise ValueError(f"monitored_barrier is only implemented for GLOO, not for {self.name()}; call barrier")

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int) -> dist.Work:
        """Post a ``send``."""
        return self._message("send", tensors[0], dstRank, tag, "send", (tensors, dstRank, tag))

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int) -> dist.Work:
        """Post a ``recv``."""
        return self._message("recv", tensors[0], srcRank, tag, "recv", (tensors, srcRank, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Post a ``recv`` from any rank."""
        return self._message("recv", tensors[0], None, tag, "recv_anysource", (tensors, tag))


def _define_flat_calls() -> None:
    """Add the calls on one flat tensor, under each name that a supported torch uses."""

    def gather_one(name: str) -> Callable[..., dist.Work]:
        def call(self: WatchedGroup, *args: Any, **kwargs: Any) -> dist.Work:
            output, input, opts = FORMS[name].of(args, kwargs)
            return self._gather_flat([output], [input], (name, (output, input, opts)))

        return call

    def gather_many(name: str) -> Callable[..., dist.Work]:
        def call(self: WatchedGroup, *args: Any, **kwargs: Any) -> dist.Work:
            outputs, inputs, opts = FORMS[name].of(args, kwargs)
            return self._gather_flat(outputs, inputs, (name, (outputs, inputs, opts)))

        return call

    def scatter_one(name: str) -> Callable[..., dist.Work]:
        def call(self: WatchedGroup, *args: Any, **kwargs: Any) -> dist.Work:
            output, input, opts = FORMS[name].of(args, kwargs)
            return self._scatter_flat([output], [input], opts, (name, (output, input, opts)))

        return call

    def scatter_many(name: str) -> Callable[..., dist.Work]:
        def call(self: WatchedGroup, *args: Any, **kwargs: Any) -> dist.Work:
            outputs, inputs, opts = FORMS[name].of(args, kwargs)
            return self._scatter_flat(outputs, inputs, opts, (name, (outputs, inputs, opts)))

        return call

    def all_to_all(name: str) -> Callable[..., dist.Work]:
        def call(self: WatchedGroup, *args: Any, **kwargs: Any) -> dist.Work:
            output, input, out_splits, in_splits, opts = FORMS[name].of(args, kwargs)
            rows = numbers(out_splits), numbers(in_splits)
            return self._all_to_all_flat(output, input, *rows, (name, (output, input, *rows, opts)))

        return call

    names = {
        gather_one: FLAT_ALL_GATHER,
        gather_many: ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        scatter_one: FLAT_REDUCE_SCATTER,
        scatter_many: ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        all_to_all: ("all_to_all_single", "alltoall_base"),
    }
    for make, both in names.items():
        for name in both:
            setattr(WatchedGroup, name, make(name))


_define_flat_calls()
exclude_from_flight_recorder(WatchedGroup)
uncompiled(WatchedGroup)  # after all methods are defined
