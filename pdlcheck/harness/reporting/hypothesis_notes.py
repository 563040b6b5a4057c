"""Calls of Hypothesis's ``note``, ``event`` and ``target`` in the body of a property that runs on ranks.

The example belongs to the controller, so the calls are repeated there. Notes get the rank as a prefix; targets get it
in their labels if they differ between ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from hypothesis import event, note, target
from hypothesis.control import _current_build_context
from hypothesis.errors import InvalidArgument
from hypothesis.reporting import with_reporter
from hypothesis.strategies import DataObject
from hypothesis.strategies._internal.random import HypothesisRandom

__all__ = ["hear", "refuse_drawing", "tell"]

Said = Sequence[Any]  # the name of the function, and its arguments


@contextmanager
def hear(say: Callable[[Said], None]) -> Iterator[None]:
    """Pass, on a rank, the calls in the block to ``say``."""
    data = SimpleNamespace(
        events=_Heard("event", say),
        target_observations=_Heard("target", say),
        provider=SimpleNamespace(avoid_realization=False),
        note=lambda text: None,  # the controller's call is the one that Hypothesis observes
        _observability_predicates=defaultdict(_Uncounted),
    )
    context: Any = SimpleNamespace(is_final=True, data=data)  # the controller decides what is shown
    with _current_build_context.with_value(context), with_reporter(lambda text: say(("note", text))):
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


def refuse_drawing(name: str, value: object) -> None:
    """Raise an error if an argument draws while the test runs, because only the controller can draw."""
    if isinstance(value, DataObject):
        made, cure = "st.data()", "draw what the ranks need in a strategy, with @st.composite"
    elif isinstance(value, HypothesisRandom):
        made, cure = "st.randoms()", "draw a seed with st.integers(), and let each rank make random.Random(seed)"
    else:
        return
    raise InvalidArgument(f"argument {name!r} comes from {made}, which draws while the test runs: ranks cannot; {cure}")


class _Uncounted:
    """A stand-in for Hypothesis's counter of ``assume`` and ``reject``."""

    def update_count(self, *, condition: bool) -> None:
        """Count nothing, because the controller counts the exceptions that ranks raise."""


class _Heard(dict[str, Any]):
    def __init__(self, what: str, say: Callable[[Said], None]) -> None:
        self._what = what
        self._say = say

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._say((self._what, key, value))
