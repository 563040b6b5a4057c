"""`python ci/catalogue.py` describes the outcome of a run correctly."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from pdlcheck.errors import Deadlock, RankDied, RankFailed, RankTimeout

from ..clone import ROOT

SHOWN = ROOT / "ci" / "catalogue_page" / "shown.py"
ABORT = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /src/gloo/pair.cc:456] op.nbytes. 6 vs 4
Fatal Python error: Aborted
"""


@pytest.fixture(scope="module")
def shown():
    if not SHOWN.exists():
        pytest.skip("needs ci/catalogue_page: run the suites in a clone of the repository")
    spec = importlib.util.spec_from_file_location("_shown", SHOWN)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # a dataclass looks up its module
        patch.setitem(sys.modules, "_shown", module)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (RankTimeout("no result"), "hangs"),
        (RankDied("gone", rank=1, exitcode=-6, stderr=ABORT), "dies: SIGABRT, op.nbytes. 6 vs 4"),
        (RankDied("gone", rank=1, exitcode=3, stderr=""), "dies: exit code 3"),
        (RankFailed("rank 1 raised SystemExit: 3", rank=1, traceback=""), "error: rank 1 raised SystemExit: 3"),
        (Deadlock("no rank can go on"), "Deadlock"),
        (ValueError("no part of <Group at 0x7fac3f>"), "error: ValueError: no part of <Group>"),
        (RuntimeError("[/src/pair.cc:456] closed by peer\nmore"), "error: RuntimeError: closed by peer"),
        ([torch.ones(2), [3.0]], "silent"),
        ([torch.ones(2), None], "silent"),
        ([torch.zeros(2), [3.0]], "wrong values silently"),
        ([torch.ones(2), [3.5]], "wrong values silently"),
        ([torch.ones(3), [3.0]], "wrong values silently"),
    ],
)
def test_an_outcome_is_called_what_it_is(shown, outcome, text):
    assert shown.classify(outcome, [torch.ones(2), [3.0]]).text == text


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (0.3, 0.31, False),
        (float("nan"), float("nan"), True),
        ({"a": [1.0]}, {"a": (1.0,)}, True),
        ({"a": [1.0]}, {"b": [1.0]}, False),
        ([1.0, 2.0], [1.0], False),
        ("loss 0", "loss 1", False),
    ],
)
def test_values_are_the_same_up_to_rounding(shown, one, other, same):
    assert shown.same_values(one, other) is same


def test_runs_that_differ_are_all_told(shown):
    hangs, silent, dies = shown.Shown("hangs"), shown.Shown("silent"), shown.Shown("dies", "SIGABRT")
    assert shown.in_words([hangs] * 3) == "hangs"
    assert shown.in_words([hangs, silent, hangs]) == "hangs 2 of 3, else silent"
    assert shown.in_words([dies, silent, hangs]) == "dies: SIGABRT 1 of 3, silent 1 of 3, else hangs"
