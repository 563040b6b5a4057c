"""Calls of Hypothesis's ``note``, ``event`` and ``target`` in the body of a property that runs on ranks.

The example belongs to the controller, so the calls are repeated there. Notes get the rank as a prefix; targets get it
in their labels if they differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import event, note, target
from hypothesis.reporting import with_reporter

from pdlcheck.compat.hypothesis import no_example

__all__ = ["hear", "tell"]

Said = Sequence[Any]  # the name of the function, and its arguments


@contextmanager
def hear(say: Callable[[Said], None]) -> Iterator[None]:
    """Pass, on a rank, the calls in the block to ``say``."""
    events, targets = _Heard("event", say), _Heard("target", say)
    with no_example(events, targets), with_reporter(lambda text: say(("note", text))):
        yield


def tell(said: Sequence[Sequence[Said]]) -> None:
    """Repeat the calls of every rank, in the controller while the example runs."""
    targets: list[dict[str, float]] = [{} for _ in said]
    for rank, mine in enumerate(said):
        for what, *arguments in mine:
            if what == "note":
                note(f"rank {rank}: {arguments[0]}")
            elif what == "event":
                event(*arguments)
            else:
                targets[rank][arguments[0]] = arguments[1]
    alike = all(mine == targets[0] for mine in targets)
    for rank, values in enumerate(targets[:1] if alike else targets):
        for label, value in values.items():
            target(value, label=label if alike else f"{label} [rank {rank}]".strip())


class _Heard(dict[str, Any]):
    def __init__(self, what: str, say: Callable[[Said], None]) -> None:
        self._what = what
        self._say = say

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._say((self._what, key, value))
