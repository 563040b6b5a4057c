"""The one verdict that pytest receives for the outcomes of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import SkipTest

import pytest

from pdlcheck.harness.reporting.rank_reports import RankReports
from pdlcheck.worlds.outcome import Outcome, Raised, first_cause, results, without_addresses

__all__ = ["verdict"]

_SKIPS = (pytest.skip.Exception, SkipTest)  # raised in a body, or in a TestCase
_LATER = 1_000_000_000  # added to the order of skips, so that a failure is always the first cause


def verdict(outcomes: Sequence[Outcome], reports: RankReports | None = None) -> list[Any]:
    """Return the results, or raise the first cause: a failure before an expected failure, and that before a skip.

    A rank that skips stops the others. The reason names the ranks that skipped, unless all skipped with the same
    reason.

    Args:
        outcomes: the outcome of each rank.
        reports: the reports that the ranks have sent; the one of the first cause becomes that of the item.
    """
    __tracebackhide__ = True
    sent = {} if reports is None else {outcome.rank: reports.of(outcome.rank) for outcome in outcomes}
    ranked = [_in_order(outcome, sent.get(outcome.rank)) for outcome in outcomes]
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
    if first is not None and reports is not None:
        reports.blame(first.rank, first.error)
    return results([_rendered(outcome, sent.get(outcome.rank), is_first=outcome is first) for outcome in ranked])


def _in_order(outcome: Outcome, report: pytest.TestReport | None) -> Outcome:
    if not isinstance(outcome, Raised):
        return outcome
    error = outcome.error
    if isinstance(error, _SKIPS):
        return replace(outcome, order=outcome.order + 2 * _LATER)
    if isinstance(error, pytest.xfail.Exception) or hasattr(report, "wasxfail"):
        return replace(outcome, order=outcome.order + _LATER)
    return outcome


def _rendered(outcome: Outcome, report: pytest.TestReport | None, *, is_first: bool) -> Outcome:
    """Replace a rank's traceback by its report, which has more details.

    The traceback of the first cause becomes empty, because the item's report is that of its rank.
    """
    if isinstance(outcome, Raised) and isinstance(outcome.error, pytest.exit.Exception):
        return replace(outcome, traceback="")  # pytest shows only its reason
    if report is None or not isinstance(outcome, Raised):
        return outcome
    return replace(outcome, traceback="" if is_first else report.longreprtext.strip("\n"), output="")
