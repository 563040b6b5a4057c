"""Faults that Hypothesis draws: it finds the smallest fault that a program does not survive, and rejects others."""

from __future__ import annotations

from copy import deepcopy
from pickle import dumps, loads

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, find, given, settings
from hypothesis.errors import FailedHealthCheck, Unsatisfiable

from pdlcheck.errors import Inconclusive, RankDied, RankStalled
from pdlcheck.faults import Absent, Corrupt, Kill, Stall
from pdlcheck.strategies import faults
from pdlcheck.worlds import get_world

QUICK = settings(max_examples=60, database=None, deadline=None, derandomize=True, phases=[Phase.generate, Phase.shrink])


def reduce_twice(careful=()):
    """Return a total on rank 0; every rank survives the operations in ``careful``."""
    x = torch.ones(1)
    for number in range(2):
        try:
            dist.all_reduce(x)
        except RuntimeError:
            if number not in careful:
                raise
            return -1.0
    return x.item()


def survives(drawn, careful, world_size=3):
    try:
        get_world("sim", faults=drawn).run(reduce_twice, careful, world_size=world_size)
    except (RankDied, RankStalled):
        return False
    return True


def least(careful, **kwargs):
    return find(faults(world_size=3, **kwargs), lambda drawn: not survives(drawn, careful), settings=QUICK)


def test_it_finds_a_fault_that_the_program_does_not_survive_and_shrinks_to_the_least():
    assert least(careful=(), operations=4) == (Absent(0),)
    assert least(careful=(), operations=4, kinds=[Absent, Corrupt, Kill]) == (Absent(0),)
    assert least(careful=(), operations=4, kinds=[Kill, Stall, Corrupt]) == (Kill(0, 0),)
    assert least(careful=[0], operations=4, kinds=[Kill, Stall, Corrupt]) == (Kill(0, 1),)
    assert least(careful=(), operations=4, kinds=[Stall, Corrupt]) == (Stall(0, 0),)
    assert least(careful=(), operations=4, kinds=[Stall], at_most=2) == (Stall(0, 0),)


def test_a_program_that_survives_all_of_them_passes():
    @QUICK
    @given(drawn=faults(world_size=3, operations=4, kinds=[Kill, Stall, Corrupt], at_most=2))
    def test(drawn):
        seen.append(drawn)
        assert survives(drawn, careful=[0, 1])

    seen = []
    test()
    lost = {type(fault) for drawn in seen for fault in drawn}
    assert lost == {Kill, Stall, Corrupt}
    assert any(len(drawn) == 2 for drawn in seen)
    assert () in seen


def test_every_drawn_value_is_shown_as_a_list_of_faults():
    @QUICK
    @given(drawn=faults(world_size=3, operations=4, kinds=[Kill]))
    def test(drawn):
        assert survives(drawn, careful=[0])

    with pytest.raises(AssertionError) as failure:
        test()
    assert "drawn=[Kill(rank=0, operation=1)]" in "\n".join(failure.value.__notes__)


def test_an_example_whose_fault_does_not_come_about_is_rejected_and_is_never_a_pass():
    ended = []

    @QUICK
    @given(drawn=faults(world_size=2, operations=4, kinds=[Kill]))
    def test(drawn):
        get_world("sim", faults=drawn).run(reduce_twice, [0, 1], world_size=2)
        ended.extend(fault.operation for fault in drawn)

    test()
    assert set(ended) == {0, 1}
    with pytest.raises(Inconclusive):
        get_world("sim", faults=[Kill(0, 2)]).run(reduce_twice, world_size=2)

    @QUICK
    @given(drawn=faults(world_size=2, operations=4, kinds=[Kill]).filter(len))
    def never(drawn):
        get_world("sim", faults=drawn).run(lambda: None, world_size=2)

    with pytest.raises((FailedHealthCheck, Unsatisfiable)):
        never()


@QUICK
@given(faults(world_size=3, operations=2, at_most=9))
def test_one_rank_is_left_each_suffers_once_and_absence_is_alone(drawn):
    ranks = [fault.rank for fault in drawn]
    assert len(set(ranks)) == len(ranks) < 3
    assert len({isinstance(fault, Absent) for fault in drawn}) <= 1
    assert deepcopy(drawn) is drawn
    assert loads(dumps(drawn)) == drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 1, "operations": 1}, "faults: world_size must be an int of at least 2; got 1"),
        ({"world_size": 2, "operations": 0}, "faults: operations must be an int of at least 1; got 0"),
        ({"world_size": 2, "operations": 1, "at_most": 0.5}, "faults: at_most must be an int of at least 1; got 0.5"),
        ({"world_size": 2, "operations": 1, "kinds": ["kill"]}, "faults: kinds must be some of Kill, .*; got .'kill'."),
    ],
)
def test_arguments_that_cannot_be_meant_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        faults(**arguments)
