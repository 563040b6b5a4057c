"""What the body of a property says on its ranks with Hypothesis's ``note``, ``event`` and ``target``.

The example belongs to the controller, so a rank says it there: notes with the rank, targets that differ with the rank.
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

Said = Sequence[Any]  # what it is, and its arguments


@contextmanager
def hear(say: Callable[[Said], None]) -> Iterator[None]:
    """On a rank: give what the block says to ``say``."""
    data = SimpleNamespace(
        events=_Heard("event", say),
        target_observations=_Heard("target", say),
        provider=SimpleNamespace(avoid_realization=False),
        note=lambda text: None,  # observed where it is told
        _observability_predicates=defaultdict(_Uncounted),
    )
    context: Any = SimpleNamespace(is_final=True, data=data)  # what is shown is decided where it is told
    with _current_build_context.with_value(context), with_reporter(lambda text: say(("note", text))):
        yield


def tell(said: Sequence[Sequence[Said]]) -> None:
    """In the controller, while the example runs: say it for every rank."""
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
    """Raise if an argument draws while the test runs, which the controller alone can."""
    if isinstance(value, DataObject):
        made, cure = "st.data()", "draw what the ranks need in a strategy, with @st.composite"
    elif isinstance(value, HypothesisRandom):
        made, cure = "st.randoms()", "draw a seed with st.integers(), and let each rank make random.Random(seed)"
    else:
        return
    raise InvalidArgument(f"argument {name!r} comes from {made}, which draws while the test runs: ranks cannot; {cure}")


class _Uncounted:
    """For ``assume`` and ``reject``."""

    def update_count(self, *, condition: bool) -> None:
        """The controller counts what the ranks raise."""


class _Heard(dict[str, Any]):
    def __init__(self, what: str, say: Callable[[Said], None]) -> None:
        self._what = what
        self._say = say

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._say((self._what, key, value))
