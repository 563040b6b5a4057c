"""The private names of Hypothesis. Import this module only where Hypothesis is imported anyway."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pdlcheck.compat.private import take, uses

if TYPE_CHECKING:
    from hypothesis import settings
    from hypothesis.strategies._internal.random import HypothesisRandom
else:
    HypothesisRandom = take(
        "hypothesis.strategies._internal.random.HypothesisRandom",
        "the error of a property on ranks that draws while it runs",
        lost="that error for st.randoms()",
    )

__all__ = ["HypothesisRandom", "no_example", "set_settings", "settings_of"]

_LOST = "note, event and target on ranks"

_context: Any = take("hypothesis.control._current_build_context", "note, event and target on ranks", lost=_LOST)


@uses("hypothesis.settings.__call__._hypothesis_internal_use_settings", lost="properties on ranks")
def settings_of(function: Any) -> settings | None:
    """Return the settings of a property; None if it has none of its own."""
    return getattr(function, "_hypothesis_internal_use_settings", None)


def set_settings(function: Any, own: settings) -> None:
    """Replace the settings of a property."""
    function._hypothesis_internal_use_settings = own


@contextmanager
@uses("hypothesis.control.assume._observability_predicates", lost="assume and reject on ranks")
def no_example(events: dict[str, Any], targets: dict[str, Any]) -> Iterator[None]:
    """Let ``event`` and ``target`` write into these in the block, where no example of Hypothesis is current."""
    data = SimpleNamespace(
        events=events,
        target_observations=targets,
        provider=SimpleNamespace(avoid_realization=False),
        note=lambda text: None,  # the controller's call is the one that Hypothesis observes
        _observability_predicates=defaultdict(_Uncounted),
    )
    with _context.with_value(SimpleNamespace(is_final=True, data=data)):  # the controller decides what is shown
        yield


class _Uncounted:
    """A stand-in for Hypothesis's counter of ``assume`` and ``reject``."""

    def update_count(self, *, condition: bool) -> None:
        """Count nothing, because the controller counts the exceptions that ranks raise."""
