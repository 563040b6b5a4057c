"""The same programs end in the same way on simulated ranks and on processes."""

from __future__ import annotations

import warnings

import pytest
import torch

from pdlcheck.worlds import get_world

from .programs import DEADLOCKS, EXPECTED, MISMATCHES, train_ddp

FAULTY = [*DEADLOCKS, *(program for _, program in MISMATCHES)]


@pytest.fixture(scope="module")
def worlds():
    both = get_world("sim"), get_world("gloo")
    yield both
    for world in both:
        world.close()


@pytest.mark.parametrize(("program", "expected"), EXPECTED, ids=[program.__name__ for program, _ in EXPECTED])
def test_a_program_gives_every_rank_the_same_on_both_worlds(worlds, program, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of names that it renames from release to release
        assert [world.run(program, world_size=4) for world in worlds] == [expected, expected]


def test_ddp_ends_with_the_same_weights_on_both_worlds(worlds):
    simulated, real = (world.run(train_ddp, world_size=2) for world in worlds)
    for ours, theirs in zip(simulated, real, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            # gradients of a few ones added in another order, three steps: a few units in the last place of float32
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("program", FAULTY, ids=lambda program: program.__name__)
def test_a_faulty_program_gets_the_same_verdict_on_both_worlds(worlds, program):
    verdicts = []
    for world in worlds:
        with pytest.raises(Exception) as caught:
            world.run(program, world_size=2)
        verdicts.append((caught.type, sorted(caught.value.ranks)))
    assert verdicts[0] == verdicts[1]
