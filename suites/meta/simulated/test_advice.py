"""Advice about a world is no error if a user turns all warnings into errors, and is one if a filter names it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import SharedTensorWarning
from pdlcheck.worlds import get_world
from pdlcheck.worlds.advice import advise


def shares_a_tensor():
    shared = torch.ones(3)
    get_world("sim").run(lambda: dist.all_reduce(shared), world_size=2)


@pytest.mark.parametrize("category", [Warning, UserWarning])
def test_a_right_program_does_not_fail_by_advice(category):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("error", category)
        shares_a_tensor()
    assert [one.category for one in heard] == [SharedTensorWarning]


@pytest.mark.parametrize(
    "name", [{"category": SharedTensorWarning}, {"message": "simulated ranks share a tensor"}], ids=["class", "message"]
)
def test_a_filter_that_names_it_holds(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", **name)
        with pytest.raises(SharedTensorWarning, match="simulated ranks share a tensor"):
            shares_a_tensor()


@pytest.mark.parametrize("before", ["error", "always"])
def test_advice_that_is_ignored_is_not_given(before):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter(before)
        warnings.filterwarnings("ignore", "take care")
        advise("take care")
        advise("take note")
    assert [str(one.message) for one in heard] == ["take note"]
    assert heard[0].filename == __file__


STRICT = """
import helper

def shares(): dist.all_reduce(helper.SHARED)

def test_world(world):
    world.run(shares, world_size=2)

@W
def test_on_ranks(rank): shares()
"""


@pytest.mark.parametrize(("strict", "outcomes"), [("error", {"passed": 2}), ("error::UserWarning", {"passed": 2})])
def test_a_project_that_makes_errors_of_warnings_runs_right_code(run, pytester, strict, outcomes):
    pytester.makeini(f"[pytest]\nfilterwarnings = {strict}\n")
    helper = "import torch\nSHARED = torch.ones(3)\n"
    result = run(STRICT, world="sim", new_process=True, helper=helper)
    result.assert_outcomes(warnings=2, **outcomes)
    result.stdout.fnmatch_lines(["*SharedTensorWarning: simulated ranks share a tensor*"])


@pytest.mark.slow
def test_an_option_that_ranks_cannot_have_is_advice(run, pytester):
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    pytester.makeconftest(
        "def pytest_addoption(parser):\n    parser.addoption('--odd', type=lambda text: (lambda: text), default=None)\n"
    )
    source = "@W\ndef test_on_ranks(rank): pass\n"
    run(source, "--odd", "x", world="gloo", new_process=True).assert_outcomes(passed=1, warnings=1)
