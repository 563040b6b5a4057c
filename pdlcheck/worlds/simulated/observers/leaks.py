"""Work that ranks leave behind when all have returned: operations without a wait, and messages without a receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pdlcheck.errors import LeakedWork, PdlcheckError
from pdlcheck.worlds.observe import Signature
from pdlcheck.worlds.simulated.engine.engine import SimulatedEngine
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.engine.work import SimulatedWork
from pdlcheck.worlds.simulated.observers.descriptions import in_order_on_nccl

__all__ = ["Leaks"]


class Leaks(Observer):
    """The leaked work of one run.

    Args:
        engine: carries out the operations of the run.
        describe: returns the text of an operation, and that of a later collective of its group that has ended or ''.
    """

    def __init__(self, engine: SimulatedEngine, describe: Callable[[Signature], tuple[str, str]]) -> None:
        self._engine = engine
        self._describe = describe

    def verdict(self) -> PdlcheckError | None:
        """Return the error for leaked work; None if there is none."""
        semantics = self._engine.semantics
        unwaited = _unwaited(self._engine.unwaited.values()) if semantics.unwaited else []
        sends = [work for work in self._engine.posted.values() if work.operation.signature.op == "send"]
        if semantics.unwaited:  # a send that is not buffered is among the unwaited ones
            sends = [work for work in sends if work.matched]
        return _leaked(sends if semantics.unreceived else [], unwaited, self._describe)


def _unwaited(works: Iterable[SimulatedWork]) -> list[SimulatedWork]:
    """Return the operations that count as leaked.

    Operations that torch's own code posts and never waits for (DDP's join) do not count. A future counts as a wait once
    it is done.
    """
    return [work for work in works if not (work.origin.torchs_own or work.finished)]


def _leaked(
    unreceived: Iterable[SimulatedWork],
    unwaited: Iterable[SimulatedWork],
    describe: Callable[[Signature], tuple[str, str]],
) -> LeakedWork | None:
    """Return the error for leaked work; None if there is none.

    Args:
        unreceived: the messages that no rank has received.
        unwaited: the asynchronous operations that no rank has waited for.
        describe: see :class:`Leaks`.
    """
    lost = {id(work): work for work in unreceived}
    waiting = {id(work): work for work in unwaited}
    works = sorted({**lost, **waiting}.values(), key=lambda work: work.operation.signature.rank)
    if not works:
        return None
    calls, later = zip(*(describe(work.operation.signature) for work in works), strict=True)
    lines = [
        f"rank {work.operation.signature.rank}: {call}; "
        + ("the message was never received" if id(work) in lost else _state(work))
        for work, call in zip(works, calls, strict=True)
    ]
    cure = "wait for each operation before the end; on real backends its buffers are in use"
    if all(later):
        cure += in_order_on_nccl(later[0])
    head = f"all ranks have returned, and {len(works)} operation{'s were' if len(works) > 1 else ' was'} left behind"
    return LeakedWork(
        "\n  ".join([head, *lines, cure]),
        ranks=lines,
        posted=[work.operation.signature.where for work in works],
    )


def _state(work: SimulatedWork) -> str:
    return "nobody waited for it" if work.matched else "nobody waited for it, and its partners never came"
