"""The report of a pass that fails in the middle of a step. Ranks that lose the failed rank read its report."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from pdlcheck.compat.torch.groups import default_store
from pdlcheck.primitives.pipeline.cells import Cell

__all__ = ["Mishap"]

# Parts of gloo's error texts for a peer that has ended or does not answer.
GONE = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting")


class Mishap:
    """The report of a rank about a failed pass, in the store of the default group. It costs nothing until a pass fails.

    Args:
        name: the name of the pipeline, the same on all its ranks and different for each pipeline.
        group: the ranks of the pipeline; None if there is only this process.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self._key = f"pdlcheck/pipeline/{name}"
        self._place = None if group is None else dist.get_rank(group)

    def tell(self, error: Exception, cell: Cell) -> None:
        """Add a note of the place to ``error``, which this rank raises, and store both for the other ranks."""
        kind = "forward" if cell.kind == "F" else "backward"
        where = f"in the {kind} pass of micro-batch {cell.microbatch} through stage {cell.stage}"
        error.add_note(where)
        if self._place is None:
            return
        told = f"rank {self._place} of its group failed {where}: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the rank's own error matters more
            default_store().set(self._key, told)

    def behind(self, error: Exception) -> RuntimeError | None:
        """Return an error with another rank's report, if ``error`` only states that a rank is gone; otherwise None."""
        if self._place is None or not isinstance(error, RuntimeError):
            return None
        if not any(words in str(error) for words in GONE):
            return None
        told = "it lost another rank of its group in the middle of a step; what that rank printed last says why"
        with contextlib.suppress(Exception):  # the store may have ended with the rank
            store = default_store()
            if store.check([self._key]):
                told = store.get(self._key).decode()
        return RuntimeError(f"Pipeline: {told}")
