"""Each bug of the zoo gets the verdict that its entry states, and its correct twin none."""

from __future__ import annotations

import pytest

from pdlcheck.worlds import get_world

from . import ENTRIES, judge
from .entry import explains, judge_also

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

every_entry = pytest.mark.parametrize("one", ENTRIES, ids=lambda one: one.bug)


@every_entry
def test_the_bug_gets_its_verdict(one):
    verdict = judge(one, get_world("sim"), broken=True)
    assert explains(one, verdict), f"{one.judged}: {one.cause!r} is not in:\n{verdict.cause or verdict.error}"


@every_entry
def test_the_twin_passes(one):
    verdict = judge(one, get_world("sim"), broken=False)
    assert verdict.error is None, verdict.error


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, id=one.bug, marks=pytest.mark.slow if one.bug == "set-order-of-strings" else ())
        for one in ENTRIES
        if one.also
    ],
)
def test_what_is_missed_is_found_by_another_check(one):
    assert one.judged == "missed"
    assert judge_also(one, get_world("sim"), broken=True).error is not None
    assert judge_also(one, get_world("sim"), broken=False).error is None


@every_entry
def test_an_entry_says_what_it_is(one):
    assert one.what
    assert one.source
    assert bool(one.why) == (one.judged != "right")
    assert bool(one.cause) == (one.judged in ("right", "partial", "wrong"))


def test_no_bug_is_there_twice():
    assert len({one.bug for one in ENTRIES}) == len(ENTRIES)
