"""Tensors that the ranks of one run share and change.

If such a tensor was made before the run, each process would have its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from pdlcheck.compat.torch.tensors import in_place_version
from pdlcheck.errors import SharedTensorWarning
from pdlcheck.worlds.observe import Signature, user_line
from pdlcheck.worlds.simulated.engine.memory import memories, storage_of
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.engine.work import SimulatedWork

__all__ = ["TensorSharing"]


class TensorSharing(Observer):
    """The shared tensors that are found in one run.

    Only tensors that operations of one match hold at the same time are compared: from each operation the first tensor
    that it reads and the first that it writes. Parameters are compared too, if ranks add to their gradients. Processes
    may share memory as well, so tensors with ``Tensor.is_shared`` are left out.
    """

    def __init__(self) -> None:
        self._line = ""
        self._versions: dict[int, int] = {}  # id of a work -> the version of its first input when it was posted
        self._gradients: dict[int, tuple[ReferenceType[Tensor], int]] = {}  # id of a parameter -> itself, last rank

    def posted(self, work: SimulatedWork) -> None:
        """Record how often the first tensor that the operation reads was written in place, as far as torch counts."""
        parts = work.operation.parts
        tensor = parts[0].inputs[0] if parts and parts[0].inputs else None
        self._versions[id(work)] = 0 if tensor is None or tensor.is_inference() else in_place_version(tensor)

    def matched(self, works: Sequence[SimulatedWork]) -> None:
        """Compare the tensors of operations that have matched.

        Ranks that only read a tensor may share it, as long as no rank writes to it between their calls.
        """
        if self._line:
            return  # the warning needs only one
        holders: dict[int, SimulatedWork] = {}
        for work in works:
            for tensors in work.operation.parts[0] if work.operation.parts else ():
                if tensors and holders.setdefault(_storage(tensors[0]), work) is not work:
                    self._compare_access(works)
                    return

    def _compare_access(self, works: Sequence[SimulatedWork]) -> None:
        first: dict[int, tuple[SimulatedWork, bool]] = {}
        versions = self._versions
        for work in works:
            operation = work.operation
            kind = operation.method.kind
            for tensors, writes in ((kind.writes(operation), True), (kind.reads(operation), False)):
                for tensor in tensors[:1]:
                    other, wrote = first.setdefault(_storage(tensor), (work, writes))
                    changed = writes or wrote or versions.get(id(other)) != versions.get(id(work))
                    if other is not work and changed and tensor.numel() and not _is_of_processes(tensor):
                        self._tell(_both(other.operation.signature, work.operation.signature))
                        return

    def accumulates(self, rank: int, parameter: Tensor) -> None:
        """Record that a rank is about to add to the gradient of ``parameter``."""
        known, other = self._gradients.get(id(parameter), (None, rank))
        self._gradients[id(parameter)] = ref(parameter), rank
        if other != rank and known is not None and known() is parameter and parameter.grad is not None:
            self._tell(
                f"rank {rank} adds to the gradient of rank {other} of a tensor of shape {tuple(parameter.shape)}, at "
                f"{user_line()}"
            )

    def warning(self) -> SharedTensorWarning | None:
        """Return the warning; None if there is none."""
        if not self._line:
            return None
        return SharedTensorWarning(
            f"simulated ranks share a tensor, of which each process would have its own: {self._line}; make it in the "
            "function that the ranks run, or pass it as an argument; if a module holds it, the ini value "
            "pdlcheck_own_globals with the name of the module gives each rank its own"
        )

    def _tell(self, line: str) -> None:
        self._line = self._line or line


def _both(one: Signature, other: Signature) -> str:
    first, second = sorted((one, other), key=lambda signature: signature.rank)
    if first.where == second.where and first.kind == second.kind:
        return f"ranks {first.rank} and {second.rank} in {first}"
    return f"rank {first.rank} in {first}, rank {second.rank} in {second}"


def _storage(tensor: Tensor) -> int:
    if tensor.layout is torch.strided:
        return storage_of(tensor)
    held = memories(tensor)
    return storage_of(held[-1]) if held else id(tensor)


def _is_of_processes(tensor: Tensor) -> bool:
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]
