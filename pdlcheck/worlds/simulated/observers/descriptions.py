"""The texts by which reports describe the operations of a run."""

from __future__ import annotations

from pdlcheck.worlds.observe import Callers, Signature
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.engine.work import SimulatedWork

__all__ = ["Descriptions", "in_order_on_nccl"]


class Descriptions(Observer):
    """The texts of the operations of one run: with their callers, and with later collectives that have ended."""

    def __init__(self) -> None:
        self._callers = Callers()
        self._ended: dict[tuple[int, str], Signature] = {}  # rank, group -> the last collective that has ended

    def posting(self, signature: Signature) -> None:
        """Note the caller of an operation."""
        self._callers.note(signature)

    def finished(self, work: SimulatedWork) -> None:
        """Note that an operation has ended."""
        signature = work.operation.signature
        if (last := self._ended.get(key := (signature.rank, signature.group))) is None or last.seq < signature.seq:
            self._ended[key] = signature

    def text(self, signature: Signature) -> str:
        """Return the text of an operation."""
        return self._callers.told(signature)

    def describe(self, signature: Signature) -> tuple[str, str]:
        """Return the text of a pending operation, and that of a later collective of its group that has ended or ''."""
        later = None if signature.is_p2p else self._ended.get((signature.rank, signature.group))
        is_later = later is not None and later.seq > signature.seq
        return self.text(signature), f"{later.op}, collective {later.seq}" if later and is_later else ""


def in_order_on_nccl(later: str) -> str:
    """Return the line for an operation that has ended on NCCL, because ``later`` has; empty without ``later``."""
    return later and (
        f"\n  on nccl, which keeps their order, it has ended before {later}; code for nccl alone: semantics('nccl')"
    )
