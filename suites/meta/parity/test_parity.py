"""The same programs end alike on simulated ranks and on processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Deadlock, PdlcheckError, PeerFailed, RankFailed
from pdlcheck.worlds import get_world

from ..every_world.programs import DEADLOCKS, EXPECTED, MISMATCHES, train_ddp
from . import BOTH_REFUSE, LEFT_OPEN, ONLY_GLOO, ONLY_SIM, REFUSALS, SAME, TRAINING
from .comparing import name, of_this_torch, on_both, refuses, same_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of names that it renames from release to release
FAULTY = [*DEADLOCKS, *(program for _, program in MISMATCHES)]


@pytest.fixture(scope="module")
def worlds():
    # torch numbers some group names by the groups made before, so each program begins without any
    both = get_world("sim"), get_world("gloo", isolation="reinit")
    yield both
    for world in both:
        world.close()


@pytest.mark.parametrize(("program", "expected"), EXPECTED, ids=[program.__name__ for program, _ in EXPECTED])
def test_a_program_gives_every_rank_the_same_on_both_worlds(worlds, program, expected):
    assert [world.run(program, world_size=4) for world in worlds] == [expected, expected]


def test_ranks_that_end_as_if_another_had_failed_have_not_returned(worlds):
    def kept():
        raise PeerFailed("of an earlier run")

    def kept_by_one():
        if dist.get_rank() == 1:
            kept()
        return dist.get_rank()

    for world in worlds:
        for function, words in ((kept, r"rank \d raised PeerFailed"), (kept_by_one, "rank 1 raised PeerFailed")):
            with pytest.raises(RankFailed, match=words):
                world.run(function, world_size=2)
        assert world.run(dist.get_rank, world_size=2) == [0, 1]


def test_there_are_50_programs_and_more():
    programs = [*(program for program, _ in EXPECTED), *SAME, *TRAINING]
    assert len(set(programs)) >= 50
    assert len(programs) == len(set(programs))


@pytest.mark.parametrize("program", of_this_torch(SAME), ids=name)
def test_a_program_returns_the_same_bits_on_both_worlds(worlds, program):
    simulated, real = on_both(worlds, program)
    assert simulated == real


@pytest.mark.parametrize("program", of_this_torch(REFUSALS), ids=name)
def test_what_torch_refuses_is_refused_on_every_rank_of_both_worlds(worlds, program):
    simulated, real = on_both(worlds, program)
    assert simulated == real
    assert "accepted" not in str(real)


@pytest.mark.parametrize("program", TRAINING, ids=name)
def test_training_ends_with_the_same_weights_on_both_worlds(worlds, program):
    simulated, real = (world.run(program, world_size=4) for world in worlds)
    same_weights(program, simulated, real)


@pytest.mark.parametrize(("program", "refusal"), ONLY_SIM.items(), ids=name)
def test_what_gloo_does_not_do(worlds, program, refusal):
    sim, gloo = worlds
    assert sim.run(program, world_size=4)
    refuses(gloo, program, refusal)


@pytest.mark.parametrize(("program", "refusal"), ONLY_GLOO.items(), ids=name)
def test_what_simulated_ranks_do_not_do(worlds, program, refusal):
    sim, gloo = worlds
    refuses(sim, program, refusal)
    assert gloo.run(program, world_size=4)


@pytest.mark.parametrize(("program", "refusals"), BOTH_REFUSE.items(), ids=name)
def test_what_the_worlds_refuse_in_their_own_words(worlds, program, refusals):
    for world, refusal in zip(worlds, refusals, strict=True):
        refuses(world, program, refusal)


def _xfails(programs):
    for program, reason in programs.items():
        yield pytest.param(program, marks=pytest.mark.xfail(raises=AssertionError, reason=reason, strict=True))


@pytest.mark.parametrize("program", list(_xfails(LEFT_OPEN)), ids=name)
def test_what_the_worlds_do_in_different_ways(worlds, program):
    simulated, real = on_both(worlds, program)
    assert simulated == real


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
        with pytest.raises(PdlcheckError) as caught:
            world.run(program, world_size=2)
        verdicts.append((caught.type, sorted(caught.value.ranks)))
    assert verdicts[0] == verdicts[1]


def leaves_after(steps):
    for _ in range(steps[dist.get_rank()]):
        dist.all_reduce(torch.ones(2))


def test_the_last_operation_of_a_rank_that_has_returned_is_in_the_report_of_both_worlds(worlds):
    told = []
    for world in worlds:
        with world.open(3) as ranks:
            ranks.run(leaves_after, [2, 2, 2])  # collectives are counted from 0 in each call
            with pytest.raises(Deadlock) as caught:
                ranks.run(leaves_after, [3, 3, 2])
        told.append(caught.value.ranks)
        last = "all_reduce(SUM) of float32 (2,), default group (ranks 0-2), collective 1, at suites/meta/parity/"
        assert caught.value.ranks[2].startswith(f"rank 2: has returned; last operation {last}")
        with pytest.raises(Deadlock) as caught:
            world.run(leaves_after, [1, 1, 0], world_size=3)
        assert caught.value.ranks[2] == "rank 2: has returned without an operation"
    assert told[0] == told[1]
