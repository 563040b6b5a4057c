"""check_resume rejects checkpoints from which another number of ranks cannot resume."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_resume
from pdlcheck.errors import CheckFailed, Inconclusive

from .resized_trainers import DataParallel, FullySharded, Layers, Owned, SamplerOfOneRank, Sharded


def fails(program, world, *, saved=2, resumed=1, **changes):
    """Return the error of the check for a program with these attributes."""
    broken = type("Broken", (program,), changes)
    with pytest.raises(CheckFailed, match=f"saved by {saved} ranks after step 3, resumed on {resumed}, ") as caught:
        check_resume(broken.start, world, world_size=saved, resume_world_size=resumed)
    assert f"on {saved} ranks it passes" in str(caught.value)
    return caught.value


@pytest.mark.parametrize("sizes", [(4, 2), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("program", [DataParallel, Layers, Owned, Sharded], ids=lambda one: one.__name__)
def test_files_that_do_not_depend_on_the_number_of_ranks_pass(world, program, sizes):
    check_resume(program.start, world, world_size=sizes[0], resume_world_size=sizes[1])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)], ids=str)
def test_checkpoints_of_torch_pass(world, sizes):
    check_resume(FullySharded.start, world, world_size=sizes[0], resume_world_size=sizes[1])


def test_a_position_that_counts_the_samples_of_one_rank(world):
    error = fails(DataParallel, world, saved=4, resumed=2, sampler=SamplerOfOneRank)
    assert "on 2 ranks, load leaves wrong: batches; put back from a run of 2 ranks without a stop" in error.cause
    assert "it counts 6, and should count 12, and 6 times 4 ranks is 12 times 2" in error.cause
    assert error.evidence == "batches['position'] is 6 instead of 12"


def test_a_lost_position_is_not_one_that_counts_per_rank(world):
    error = fails(DataParallel, world, forgets=["sampler"])
    assert "load leaves wrong: batches" in error.cause
    assert "times" not in error.cause


def test_layers_under_the_numbers_of_their_stage(world):
    error = fails(Layers, world, saved=2, resumed=4, numbers_are_local=True)
    named = (
        r"on 4 ranks, rank 0 holds as parameter '0.weight' what rank 1 of 2 held as parameter '2.weight', and should"
    )
    assert re.search(named, error.cause)
    assert "should hold what rank 0 held as parameter '0.weight': the names or places in the file are" in error.cause


def test_weights_that_are_not_loaded_are_in_no_other_place(world):
    error = fails(DataParallel, world, forgets=["model"])
    assert "on 1 rank, rank 0 holds as parameter '0.weight' what start made" in error.cause
    assert "held as" not in error.cause


def test_padding_of_the_old_number_of_ranks(world):
    error = fails(Sharded, world, keeps_padding=True)
    assert "load leaves wrong: optimizer" in error.cause
    assert "it holds the right numbers in order, with zeros in other places: the padding is that of 2" in error.cause


def test_an_optimizer_that_is_not_loaded_has_no_padding_and_no_share_of_others(world):
    for program in (Sharded, Owned):
        error = fails(program, world, forgets=["optimizer"])
        assert error.cause.endswith("the training goes on as without a stop")


def test_a_share_of_the_optimizer_that_is_cut_by_the_old_number_of_ranks(world):
    error = fails(Owned, world, reads_all_files=False)
    assert "load leaves wrong: optimizer" in error.cause
    assert "rank 0 of 1 loads what rank 0 of 2 held: its share is that of 2 ranks" in error.cause


def test_files_that_only_the_saving_ranks_have(world):
    error = fails(DataParallel, world, saved=2, resumed=4, has_rank_files=True)
    assert re.search(r"on 4 ranks, one reads rank-[23].pt, and 2 ranks wrote rank-0.pt, rank-1.pt", error.cause)


@pytest.mark.parametrize("numel", [12, 9])
def test_a_shard_of_the_old_size_is_named_if_the_sizes_fit(world, numel):
    class Table(DataParallel):
        has_rank_files = True

        def make_optimizer(self):
            self.table = torch.zeros(numel if dist.get_world_size() == 1 else 6)
            return super().make_optimizer()

        def state(self):
            return super().state() | {"table": self.table}

        def restore(self, state):
            super().restore(state)
            self.table.copy_(state["table"])

    error = fails(Table, world)
    assert "a rank raises RuntimeError: The size of tensor" in str(error)
    of_12 = "the error names sizes of 12 and 6 elements, which are as 1 to 2: load puts the shard of one of 2 ranks in"
    assert (of_12 in (error.cause or "")) == (numel == 12)


def test_a_training_that_depends_on_the_number_of_ranks_is_inconclusive(world):
    broken = type("Draws", (DataParallel,), {"dropout": 0.4, "has_rank_files": True})
    with pytest.raises(Inconclusive, match="the training depends on the number of ranks"):
        check_resume(broken.start, world, world_size=4, resume_world_size=2)


def test_another_number_of_ranks_is_needed(world):
    with pytest.raises(ValueError, match="another number of ranks than world_size, got 2 and 2"):
        check_resume(DataParallel.start, world, world_size=2, resume_world_size=2)
