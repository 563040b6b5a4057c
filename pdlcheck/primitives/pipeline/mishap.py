"""A pass that fails in the middle of a step, where ranks no longer agree: those that lose its rank read what it met."""

from __future__ import annotations

import contextlib

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from pdlcheck.primitives.pipeline.cells import Cell

__all__ = ["Mishap"]

# in what gloo says where a rank has ended, or does not answer
GONE = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting")


class Mishap:
    """What a rank met in a pass. It costs nothing until then: the rank leaves it in the store of the default group.

    Args:
        name: of the pipeline, the same on all its ranks and another one for each pipeline.
        group: the ranks of the pipeline; None where there is only this process.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self._key = f"pdlcheck/pipeline/{name}"
        self._place = None if group is None else dist.get_rank(group)

    def tell(self, error: Exception, cell: Cell) -> None:
        """Note on ``error``, which this rank raises, where it was met, and leave both for the others."""
        kind = "forward" if cell.kind == "F" else "backward"
        where = f"in the {kind} pass of micro-batch {cell.microbatch} through stage {cell.stage}"
        error.add_note(where)
        if self._place is None:
            return
        told = f"rank {self._place} of its group failed {where}: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # its own error matters more
            _get_default_store().set(self._key, told)

    def behind(self, error: Exception) -> RuntimeError | None:
        """What another rank met, where ``error`` says no more than that it is gone."""
        if self._place is None or not isinstance(error, RuntimeError):
            return None
        if not any(words in str(error) for words in GONE):
            return None
        told = "it lost another rank of its group in the middle of a step; what that rank printed last says why"
        with contextlib.suppress(Exception):  # the store may have ended with the rank
            store = _get_default_store()
            if store.check([self._key]):
                told = store.get(self._key).decode()
        return RuntimeError(f"Pipeline: {told}")
