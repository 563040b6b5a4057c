"""The one verdict that pytest receives for the outcomes of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import SkipTest

import pytest

from pdlcheck.harness.reporting.reports import RANK_REPORT, RANK_XFAIL
from pdlcheck.worlds.outcome import Outcome, Raised, first_cause, results, without_addresses

__all__ = ["verdict"]

_SKIPS = (pytest.skip.Exception, SkipTest)  # raised in a body, or in a TestCase
_LATER = 1_000_000_000  # added to the order of skips, so that a failure is always the first cause


def verdict(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the results, or raise the first cause: a failure before an expected failure, and that before a skip.

    A rank that skips stops the others. The reason names the ranks that skipped, unless all skipped with the same
    reason.
    """
    __tracebackhide__ = True
    ranked = [_in_order(outcome) for outcome in outcomes]
    raised = [outcome for outcome in ranked if isinstance(outcome, Raised)]
    skipped = [outcome for outcome in raised if isinstance(outcome.error, _SKIPS)]
    if raised and len(skipped) == len(raised):
        reasons = {without_addresses(str(outcome.error)) for outcome in skipped}
        if len(skipped) == len(outcomes) and len(reasons) == 1:
            reason = str(skipped[0].error)
        else:
            reason = "; ".join(f"rank {o.rank} of {len(outcomes)} skipped: {o.error}" for o in skipped)
        raise pytest.skip.Exception(reason, _use_item_location=True)
    first = first_cause(raised) if raised else None
    return results([_rendered(outcome, is_first=outcome is first) for outcome in ranked])


def _in_order(outcome: Outcome) -> Outcome:
    if not isinstance(outcome, Raised):
        return outcome
    error = outcome.error
    if isinstance(error, _SKIPS):
        return replace(outcome, order=outcome.order + 2 * _LATER)
    if isinstance(error, pytest.xfail.Exception) or hasattr(error, RANK_XFAIL):
        return replace(outcome, order=outcome.order + _LATER)
    return outcome


def _rendered(outcome: Outcome, *, is_first: bool) -> Outcome:
    """Replace a rank's traceback by its report, which has more details.

    The traceback of the first cause becomes empty, because ``reports.py`` in this folder shows its report.
    """
    if isinstance(outcome, Raised) and isinstance(outcome.error, pytest.exit.Exception):
        return replace(outcome, traceback="")  # pytest shows only its reason
    report = getattr(outcome.error, RANK_REPORT, None) if isinstance(outcome, Raised) else None
    if report is None or not isinstance(outcome, Raised):
        return outcome
    return replace(outcome, traceback="" if is_first else report, output="")
