"""The buffers that pending operations of one rank hold, and the detection of accesses before the wait.

A dispatch mode sees every operation on tensors with its schema, so it can decide what is read and what is written. The
mode is in place only while operations are pending. It lies below the user's own modes, which may come and go above it.
During a backward pass, torch restores the modes that were there when the pass began. An operation that a hook posts is
therefore watched only from the end of the pass. A rank whose hooks have posted once keeps the mode, so that the next
pass has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pdlcheck.compat.torch.autograd import in_backward
from pdlcheck.compat.torch.dispatch import COMMUNICATION, FakeTensor, schema_of
from pdlcheck.compat.torch.modes import TorchDispatchMode, enter_below, leave_below
from pdlcheck.compat.torch.tensors import storage_key
from pdlcheck.errors import BufferHazard
from pdlcheck.worlds.observe import Signature, user_line
from pdlcheck.worlds.simulated.engine.memory import memories, overlap, storage_of
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.engine.work import SimulatedWork
from pdlcheck.worlds.simulated.observers.descriptions import in_order_on_nccl

__all__ = ["BufferHazards", "HazardDetector"]


class BufferHazards(Observer):
    """The buffers of pending operations in one run.

    Operations that torch itself posts (DDP's reducer, functional collectives) are not watched. Watching costs time, and
    torch waits before it hands out a result.

    Args:
        describe: returns the text of an operation, and that of a later collective of its group that has ended or ''.
    """

    def __init__(self, describe: Callable[[Signature], tuple[str, str]]) -> None:
        self._describe = describe
        self._detectors: dict[int, HazardDetector] = {}  # of ranks that have had claims

    def posted(self, work: SimulatedWork) -> None:
        """Check that the operation leaves the buffers of pending operations alone."""
        if not self._detectors:
            return
        signature = work.operation.signature
        detector = self._detectors.get(signature.rank)
        if detector is not None and detector.held:
            for tensor in work.operation.method.kind.reads(work.operation):
                detector.check(tensor, "read", signature)
            for tensor in work.operation.method.kind.writes(work.operation):
                detector.check(tensor, "write", signature)

    def pending(self, work: SimulatedWork) -> None:
        """Claim the buffers of the operation until the rank waits for it."""
        if not work.origin.torchs_own:
            operation, signature = work.operation, work.operation.signature
            if (detector := self._detectors.get(signature.rank)) is None:
                detector = self._detectors[signature.rank] = HazardDetector(self._describe)
            kind = operation.method.kind
            detector.hold(work, signature, kind.reads(operation), kind.writes(operation))

    def finished(self, work: SimulatedWork) -> None:
        """Release the buffers of the operation."""
        if not work.origin.blocking and (detector := self._detectors.get(work.operation.signature.rank)) is not None:
            detector.release(work)

    def reads(self, rank: int, tensor: Tensor, by: str) -> None:
        """Check a read that no dispatch mode sees."""
        if (detector := self._detectors.get(rank)) is not None:
            detector.check(tensor, "read", by)

    def backward_ended(self, rank: int) -> None:
        """Watch the rank's pending operations again."""
        if (detector := self._detectors.get(rank)) is not None:
            detector.reinstall()

    def rank_ended(self, rank: int) -> None:
        """Release everything that the rank holds."""
        if (detector := self._detectors.get(rank)) is not None:
            detector.clear()


class _Claim:
    """The claim on the memory of one tensor of a pending operation."""

    def __init__(self, owner: object, signature: Signature, memory: Tensor, is_output: bool) -> None:
        self.owner = owner
        self.signature = signature
        self.memory = memory
        self.is_output = is_output


class HazardDetector(TorchDispatchMode):  # type: ignore[misc]  # torch's class, by its private name
    """The claims of one rank: all buffers that it must leave alone.

    Args:
        describe: returns the text of an operation, and that of a later collective of its group that has ended or ''.
    """

    def __init__(self, describe: Callable[[Signature], tuple[str, str]]) -> None:
        super().__init__()
        self._describe = describe
        self._by_storage: dict[int, list[_Claim]] = {}
        self._storages: dict[int, list[int]] = {}  # by the id of the owner, which the claims keep alive
        self._handling = 0
        self._posts_in_hooks = False

    @property
    def held(self) -> bool:
        """Return whether there is any claim."""
        return bool(self._by_storage)

    def hold(self, owner: object, signature: Signature, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Claim buffers: from now on ``inputs`` must not be written, and ``outputs`` neither read nor written.

        ``owner`` is the key for :meth:`release`.
        """
        written = {id(tensor) for tensor in outputs}
        for tensor in [*outputs, *(tensor for tensor in inputs if id(tensor) not in written)]:
            for memory in memories(tensor) if tensor.numel() else ():
                claim, storage = _Claim(owner, signature, memory, id(tensor) in written), storage_of(memory)
                self._by_storage.setdefault(storage, []).append(claim)
                self._storages.setdefault(id(owner), []).append(storage)
        if self._by_storage:
            self._enter()
            if in_backward():
                self._posts_in_hooks = True

    def reinstall(self) -> None:
        """Put the mode in place again after a backward pass, because torch has restored the modes from before it."""
        if self._by_storage:
            self._enter()

    def release(self, owner: object) -> None:
        """Release the claims of an operation that the rank has waited for."""
        storages = self._storages.pop(id(owner), None)
        if storages is None:  # most operations that torch itself posts are not watched
            return
        for storage in storages:
            rest = [claim for claim in self._by_storage.pop(storage, ()) if claim.owner is not owner]
            if rest:
                self._by_storage[storage] = rest
        if not (self._by_storage or self._posts_in_hooks):
            self._leave()

    def clear(self) -> None:
        """Release all claims, because the rank has ended."""
        self._by_storage.clear()
        self._storages.clear()
        self._posts_in_hooks = False
        self._leave()

    def check(self, tensor: Tensor, access: str, by: object) -> None:
        """Check that an access to ``tensor`` does not come before the wait.

        Args:
            tensor: the tensor that is accessed.
            access: ``read`` or ``write``.
            by: the operation that accesses it.

        Raises:
            BufferHazard: a pending operation holds the memory.
        """
        if not self._by_storage:
            return
        for memory in memories(tensor):
            for claim in self._by_storage.get(storage_of(memory), ()):
                if (claim.is_output or access == "write") and overlap(claim.memory, memory):
                    posted, later = self._describe(claim.signature)
                    raise _hazard(claim, posted, later, access, by.kind if isinstance(by, Signature) else str(by))

    # -- the mode ----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # a fake tensor has no memory
        if types and not _PLAIN.issuperset(types):
            return NotImplemented  # a subclass unpacks itself first, and its plain tensors come here
        if self._by_storage and (known := _reads_and_writes(func)) is not None:
            self._check_arguments(func, known, args, kwargs)
        self._handling += 1
        try:
            return func(*args, **kwargs)
        finally:
            self._handling -= 1

    def _check_arguments(
        self, func: Any, known: Sequence[tuple[str, str]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        held = self._by_storage
        for value, (_, access) in zip(args, known, strict=False):
            if type(value) in _PLAIN:
                if value.layout is torch.strided and storage_key(value.untyped_storage()) not in held:
                    continue
            elif type(value) in _SCALARS:
                continue
            for tensor in _tensors(value):
                self.check(tensor, access, func)
        if kwargs:
            by_name = dict(known)
            for name, value in kwargs.items():
                for tensor in _tensors(value):
                    self.check(tensor, by_name.get(name, "read"), func)

    def _enter(self) -> None:
        if not self._handling:  # while the mode handles a call, it is not in the stack
            enter_below(self)

    def _leave(self) -> None:
        if not self._handling:
            leave_below(self)  # in the middle of a backward pass, it is not on: torch has its own stack in place


def _hazard(claim: _Claim, posted: str, later: str, access: str, by: str) -> BufferHazard:
    signature, touched = claim.signature, user_line()
    buffer = "output" if claim.is_output else "input"
    does = {"read": "reads", "write": "writes"}[access]
    return BufferHazard(
        f"rank {signature.rank} {does} the {buffer} of a pending operation at {touched}\n"
        f"  posted  {posted}\n"
        f"  {access:6}  {by} at {touched}\n"
        f"  {_WHY[buffer]}; wait for the operation first{in_order_on_nccl(later)}",
        rank=signature.rank,
        access=access,
        buffer=buffer,
        operation=str(signature),
        posted=signature.where,
        touched=touched,
    )


_WHY = {
    "input": "until wait() returns, what is sent may be the old values or the new ones",
    "output": "until wait() returns, the buffer holds neither the old values nor the result",
}


# -- what an operation does to its arguments -------------------------------------------------------

_PLAIN = {Tensor, torch.nn.Parameter}
_SCALARS = {bool, float, int, type(None)}
_LOOK_AWAY = ("resize_", "set_", "record_stream")


@lru_cache(maxsize=4096)
def _reads_and_writes(func: Any) -> tuple[tuple[str, str], ...] | None:
    """Return (argument, access) for each argument; None for views, and for functions that read only shapes."""
    schema = schema_of(func)
    if schema is None:
        return None
    namespace, name = schema.name.split("::")
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    if is_view or namespace in COMMUNICATION or name in _LOOK_AWAY:  # communication is checked at the post
        return None
    if name.endswith("_like") or name.startswith(("new_", "sym_", "is_")):
        return None
    return tuple(
        (argument.name, "write" if argument.alias_info is not None and argument.alias_info.is_write else "read")
        for argument in schema.arguments
    )


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [item for item in value if isinstance(item, Tensor)]
    return ()
