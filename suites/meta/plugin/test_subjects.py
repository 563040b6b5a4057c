"""The fixture ``subject`` with ``--subject``: tests of a contract run on the user's function, others give a reason."""

from __future__ import annotations

import pytest

CONTRACT = """
@pytest.mark.verifies("ring_pass")
def test_of_the_contract(subject): subject(1)

@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("ring_pass")
def test_words(subject): subject(2)

@pytest.mark.if_subject_takes("group", "weight")
@pytest.mark.verifies("ring_pass")
def test_weight(subject): subject(3, group=None, weight=2)

@pytest.mark.verifies("ring_pass")
def test_own(): print("ring_pass of pdlcheck")

@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("ring_all_reduce")
def test_another(subject): pass

@pytest.mark.world_size(2)
@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("ring_pass")
def test_on_ranks(rank, subject): subject(4)
"""
MINE = """
def few(n, group=None): assert n == 1
def many(n, **keywords): assert n != 4
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_of_another_function_only_its_contract_is_asked(run, world):
    few = run(CONTRACT, "-rs", "--subject", "ring_pass=mine:few", world=world, mine=MINE)
    few.assert_outcomes(passed=2, skipped=4)
    few.stdout.fnmatch_lines_random(
        [
            "*beyond the contract of ring_pass: error messages; not asked of mine:few",
            "*not in the contract of ring_pass: parameter weight, which mine:few does not have",
            "*this test runs the ring_pass of pdlcheck; it says nothing about mine:few",
        ]
    )
    many = run(CONTRACT, "-rs", "--subject", "ring_pass=mine:many", world=world, mine=MINE)
    many.assert_outcomes(passed=3, skipped=3)  # with the weight


def test_of_its_own_function_everything_is_asked(run):
    asked = CONTRACT.replace("subject(", "(lambda *args, **keywords: None)(")
    run(asked, world="sim").assert_outcomes(passed=6, skipped=0)
