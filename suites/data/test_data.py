"""Shards are disjoint and cover the data; digests show which rank loaded which data."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from pdlcheck.checks import check_digest, check_epochs_differ, check_gathered_digests, check_shards
from pdlcheck.checks.strategies import rank_tensors
from pdlcheck.primitives import ShardSampler, shard_digest_table

TAILS = st.sampled_from(["uneven", "pad", "drop"])
THREE_DIGESTS = st.lists(st.sampled_from(["ab" * 32, "ab" * 6 + "cd" * 26, "ef" * 32]), min_size=3, max_size=3)


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("shard_indices")
@given(
    num_samples=st.integers(0, 40),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
    tail=TAILS,
    shuffle=st.booleans(),
)
def test_shards_are_disjoint_and_cover_the_data(subject, world, num_samples, world_size, epoch, tail, shuffle):
    shards = partial(subject, tail=tail, shuffle=shuffle)
    check_shards(shards, world, num_samples=num_samples, world_size=world_size, epoch=epoch, tail=tail)


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("shard_indices")
@given(num_samples=st.integers(60, 90), world_size=st.integers(1, 5), seed=st.integers(0, 2**40), tail=TAILS)
def test_every_epoch_has_an_order_of_its_own_that_can_be_drawn_again(
    subject, world, num_samples, world_size, seed, tail
):
    shards = partial(subject, seed=seed, tail=tail)
    check_epochs_differ(shards, world, num_samples=num_samples, world_size=world_size)


@pytest.mark.verifies("shard_indices")
def test_seed_and_epoch_do_not_stand_in_for_one_another(subject):
    one = subject(50, rank=0, world_size=1, seed=0, epoch=1)
    other = subject(50, rank=0, world_size=1, seed=1, epoch=0)
    assert not torch.equal(one, other)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("shard_indices")
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"rank": 2}, r"got rank=2, which is outside range\(2\)"),
        ({"rank": -1}, r"got rank=-1, which is outside range\(2\)"),
        ({"world_size": 0}, "needs world_size of at least 1, got world_size=0"),
        ({"epoch": -1}, "needs epoch of at least 0, got epoch=-1"),
        ({"num_samples": -1}, "needs num_samples of at least 0, got num_samples=-1"),
        ({"tail": "cut"}, "knows tail 'uneven', 'pad' and 'drop', got 'cut'"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_shard_indices_refuses(subject, keywords, message):
    with pytest.raises(ValueError, match=f"shard_indices {message}"):
        subject(**{"num_samples": 5, "rank": 0, "world_size": 2, **keywords})


@pytest.mark.verifies("shard_digest")
@given(tensors=rank_tensors(world_sizes=st.just(1)).filter(lambda tensors: tensors[0].numel() > 0))
def test_a_digest_is_that_of_the_data_on_every_rank(subject, world, tensors):
    check_digest(subject, tensors[0], world)


@pytest.mark.verifies("shard_digest")
def test_a_digest_sees_the_order_of_batches_and_not_their_memory(subject):
    one, two = torch.arange(6.0).view(2, 3), torch.ones(2)
    assert subject([one, two]) != subject([two, one])
    assert subject(one.t()) == subject(one.t().contiguous()) != subject(one)
    assert len(subject(torch.ones(3, dtype=torch.bfloat16))) == 64


@pytest.mark.verifies("shard_digest")
def test_a_digest_is_of_all_tensors_that_a_loader_gives(subject):
    x, y = torch.arange(8.0).view(4, 2), torch.arange(4)
    pairs = DataLoader(TensorDataset(x, y), batch_size=2)
    assert subject(pairs) == subject([x[:2], y[:2], x[2:], y[2:]]) != subject([x[:2], x[2:]])
    assert subject([{"input": x, "target": (y,)}]) == subject([x, y])
    wave = torch.tensor([1 + 2j, 3j])
    assert subject(wave.conj()) == subject(wave.conj().resolve_conj()) != subject(wave)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("gather_shard_digests")
def test_data_of_one_rank_that_cannot_be_read_is_told_to_all(subject, world):
    def gather():
        with pytest.raises(TypeError) as caught:
            subject(torch.ones(1) if dist.get_rank() == 0 else ["one"])
        return str(caught.value)

    said = "gather_shard_digests: shard_digest takes tensors, got str; torch.as_tensor makes one (on rank 1)"
    assert world.run(gather, world_size=2) == [said] * 2


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("shard_digest")
def test_a_digest_of_something_else_than_tensors_is_refused(subject):
    with pytest.raises(TypeError, match=r"shard_digest takes tensors, got ndarray; torch.as_tensor makes one"):
        subject(torch.ones(2).numpy())
    with pytest.raises(TypeError, match=r"shard_digest takes tensors, got int; torch.as_tensor makes one"):
        subject([1, 2])


@pytest.mark.verifies("gather_shard_digests")
@given(data=st.data())
def test_every_rank_learns_the_digests_of_all_shards(subject, world, data):
    choices = [torch.tensor([1.0]), torch.tensor([2.0]), torch.arange(3), torch.from_numpy(np.ones(0))]
    shards = [choices[i] for i in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))]
    check_gathered_digests(subject, shards, world)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("gather_shard_digests")
@pytest.mark.world_size(3)
def test_digests_are_gathered_in_a_group(subject, rank):
    group = dist.new_group([1, 2])
    if rank:
        first, second = subject(torch.tensor([rank]), group=group)
        assert first != second
    else:
        with pytest.raises(ValueError, match="gather_shard_digests was called on rank 0, which is outside the group"):
            subject(torch.tensor([rank]), group=group)


@pytest.mark.verifies("shard_digest_table")
@given(digests=st.lists(THREE_DIGESTS, min_size=1, max_size=4))
def test_the_table_marks_digests_that_are_equal_and_only_those(subject, digests):
    lines = subject({f"epoch {epoch}": line for epoch, line in enumerate(digests)}).splitlines()
    assert lines[0].split() == ["rank", "0", "rank", "1", "rank", "2"]
    for epoch, (line, digests_of) in enumerate(zip(lines[1:], digests, strict=True)):
        assert line.startswith(f"epoch {epoch}  {digests_of[0][:12]}")
        assert line.count(" = rank") == 3 - len(set(digests_of))  # digests may share twelve digits by chance


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("shard_digest_table")
def test_the_table_needs_a_digest_of_every_rank(subject):
    with pytest.raises(ValueError, match=r"a digest of every rank in each line, got lines of length \[1, 2\]"):
        subject({"epoch 0": ["a"], "epoch 1": ["a", "b"]})
    with pytest.raises(ValueError, match=r"got lines of length \[\]"):
        subject({})


@pytest.mark.verifies("gather_shard_digests")
def test_the_digests_of_what_samplers_gave_show_the_rank_that_forgot_its_own(subject, world):
    """Rank 2 asks for rank 0's shard, so its digests are marked in every epoch of the table."""

    def loaded(forgetful):
        rank = 0 if forgetful and dist.get_rank() == 2 else dist.get_rank()
        sampler = ShardSampler(range(30), num_replicas=3, rank=rank)
        table = {}
        for epoch in range(2):
            sampler.set_epoch(epoch)
            table[f"epoch {epoch}"] = subject(torch.tensor(list(sampler)))
        return shard_digest_table(table)

    right, wrong = world.run(loaded, False, world_size=3)[0], world.run(loaded, True, world_size=3)[0]
    assert "=" not in right
    assert [line.endswith(" = rank 0") for line in wrong.splitlines()] == [False, True, True]
