"""A sampler divides the data in every epoch, and resumes on any number of ranks where training stopped."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from pdlcheck.checks import check_sampler, check_sampler_resumes
from pdlcheck.primitives import ShardSampler, shard_indices

TAILS = st.sampled_from(["pad", "uneven", "drop"])
few = settings(max_examples=10)


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
@few
@given(num_samples=st.integers(0, 70), world_size=st.integers(1, 5), tail=TAILS, shuffle=st.booleans())
def test_a_sampler_shares_the_data_out_in_every_epoch(subject, world, num_samples, world_size, tail, shuffle):
    make = partial(subject, tail=tail, shuffle=shuffle)
    check_sampler(make, world, num_samples=num_samples, world_size=world_size, tail=tail, shuffle=shuffle)


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
@given(num_samples=st.integers(0, 20), world_size=st.integers(1, 5), drop_last=st.booleans())
def test_a_sampler_counts_as_that_of_torch(subject, num_samples, world_size, drop_last):
    for rank in range(world_size):
        arguments = range(num_samples), world_size, rank
        mine, theirs = (kind(*arguments, drop_last=drop_last) for kind in (subject, DistributedSampler))
        assert (mine.num_samples, mine.total_size) == (theirs.num_samples, theirs.total_size)
        assert (mine.drop_last, mine.dataset) == (theirs.drop_last, theirs.dataset)
        mine.commit(min(1, len(mine)))
        assert {type(sample) for sample in mine} <= {int}
        assert mine.num_samples == theirs.num_samples  # of the whole epoch
        uneven = subject(*arguments, tail="uneven")
        assert (uneven.num_samples, uneven.total_size) == (len(uneven), num_samples)


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_sampler_of_torch_does_too(world, drop_last):
    make = partial(DistributedSampler, drop_last=drop_last)
    check_sampler(make, world, num_samples=38, world_size=3, tail="drop" if drop_last else "pad")


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
@few
@given(
    legs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=3),
    last=st.integers(1, 5),
    more=st.integers(0, 12),
    tail=TAILS,
    shuffle=st.booleans(),
)
def test_what_was_not_used_comes_once_on_any_number_of_ranks(subject, world, legs, last, more, tail, shuffle):
    used = sum(world_size * samples for world_size, samples in legs)
    check_sampler_resumes(
        partial(subject, tail=tail, shuffle=shuffle, seed=3),
        world,
        num_samples=used + more + max(world_size for world_size, _ in legs),
        world_sizes=[*(world_size for world_size, _ in legs), last],
        used=[samples for _, samples in legs],
        tail=tail,
    )


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
@given(
    num_samples=st.integers(0, 20),
    world_size=st.integers(1, 4),
    epoch=st.integers(0, 2),
    tail=TAILS,
    shuffle=st.booleans(),
)
def test_a_sampler_gives_the_shard_of_shard_indices(subject, num_samples, world_size, epoch, tail, shuffle):
    for rank in range(world_size):
        sampler = subject(range(num_samples), world_size, rank, shuffle, 5, tail=tail)
        sampler.set_epoch(epoch)
        keywords = {"epoch": epoch, "shuffle": shuffle, "seed": 5, "tail": tail}
        assert list(sampler) == shard_indices(num_samples, rank=rank, world_size=world_size, **keywords).tolist()


@pytest.mark.verifies("ShardSampler")
@pytest.mark.world_size(3)
def test_rank_and_number_of_replicas_are_those_of_the_default_group(subject, rank):
    assert list(subject(range(9), shuffle=False)) == [rank, rank + 3, rank + 6]
    assert list(subject(range(9), 3, shuffle=False)) == [rank, rank + 3, rank + 6]
    assert list(subject(range(9), rank=0, shuffle=False)) == [0, 3, 6]
    assert list(subject(range(1))) == [0]


@pytest.mark.verifies("ShardSampler")
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_fetch_ahead_do_not_move_the_position(subject, workers):
    """Two workers hold eight batches when training stops after three."""

    def loader(sampler):
        prefetch = {"prefetch_factor": 4} if workers else {}
        return DataLoader(
            TensorDataset(torch.arange(60)), batch_size=2, sampler=sampler, num_workers=workers, **prefetch
        )

    def used(sampler, batches=None):
        seen = []
        for number, (batch,) in enumerate(loader(sampler)):
            if number == batches:
                break
            seen += batch.tolist()
            sampler.commit(len(batch))
        return seen

    def make():
        sampler = subject(range(60), num_replicas=2, rank=1)
        sampler.set_epoch(4)
        return sampler

    straight = used(make())
    assert len(straight) == 30
    stopped = make()
    first = used(stopped, batches=3)
    resumed = subject(range(60), num_replicas=2, rank=1)
    resumed.load_state_dict(stopped.state_dict())
    resumed.set_epoch(4)
    assert len(loader(resumed)) == 12
    assert first + used(resumed) == straight
    assert list(stopped) == straight[6:]  # the stopped sampler continues there too, without loading a state


def train(sampler, epochs, stop=None):
    """Run the loop of the docstring; return the samples of each epoch, and the state after ``stop`` steps in total."""
    seen, steps = [], 0
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        seen.append([])
        for sample in sampler:
            seen[-1].append(sample)
            sampler.commit(1)
            steps += 1
            if steps == stop:
                return seen, sampler.state_dict()
    return seen, sampler.state_dict()


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
@few
@given(num_samples=st.integers(1, 12), world_size=st.integers(1, 3), tail=TAILS, stop=st.integers(1, 12))
def test_epochs_end_where_they_would_have_ended_wherever_training_stops(subject, num_samples, world_size, tail, stop):
    """A stop exactly at the end of an epoch does not start that epoch again."""
    make = partial(subject, range(num_samples), world_size, 0, tail=tail)
    straight = [sample for epoch in train(make(), 3)[0] for sample in epoch]
    first, state = train(make(), 3, stop)
    resumed = make()
    resumed.load_state_dict(state)
    rest, _ = train(resumed, 3)
    assert [sample for epoch in first + rest for sample in epoch] == straight


@pytest.mark.verifies("ShardSampler")
def test_the_state_of_every_rank_is_the_same_while_steps_are(subject):
    states = []
    for rank in range(3):
        sampler = subject(range(11), 3, rank)
        sampler.set_epoch(2)
        sampler.commit(2)
        states.append(sampler.state_dict())
    assert states == [{"version": 1, "epoch": 2, "position": 6, "num_samples": 11, "seed": 0, "shuffle": 1}] * 3


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
@given(
    num_samples=st.integers(0, 13),
    world_size=st.integers(1, 5),
    other=st.integers(1, 5),
    batch=st.integers(1, 4),
    workers=st.booleans(),
    tail=TAILS,
)
def test_a_pass_that_is_used_up_leaves_one_state_on_all_ranks(
    subject, num_samples, world_size, other, batch, workers, tail
):
    """Shares may also be uneven or empty; on any number of ranks no sample of the pass comes again."""
    states = []
    for rank in range(world_size):
        sampler = subject(range(num_samples), world_size, rank, tail=tail)
        batches = DataLoader(range(num_samples), batch, sampler=sampler)
        for indices in list(batches) if workers else batches:  # a list fetches everything before the first step
            sampler.commit(len(indices))
        states.append(sampler.state_dict())
    assert states == states[:1] * world_size
    assert states[0]["position"] == num_samples
    for rank in range(other):
        straight, resumed = (subject(range(num_samples), other, rank, tail=tail) for _ in range(2))
        resumed.load_state_dict(states[-1])
        first, *rest = train(resumed, 3)[0]
        assert first == []
        assert rest == train(straight, 3)[0][1:]


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
@given(num_samples=st.integers(2, 13), world_size=st.integers(2, 5), other=st.integers(1, 5), shuffle=st.booleans())
def test_a_loader_that_fetched_ahead_leaves_the_last_samples_of_an_uneven_epoch(
    subject, num_samples, world_size, other, shuffle
):
    """After the last step that all ranks take, two kinds of state are valid.

    Rank 0's state is valid for any number of ranks; each rank's own state is valid for the same number.
    """
    make = partial(subject, range(num_samples), tail="uneven", shuffle=shuffle)
    samplers = [make(world_size, rank) for rank in range(world_size)]
    shares = [list(sampler) for sampler in samplers]  # to the end, before the first step
    steps = num_samples // world_size
    for sampler in samplers:
        sampler.commit(steps)
    states = [sampler.state_dict() for sampler in samplers]
    left = [share[steps:] for share in shares]
    for rank, state in enumerate(states):
        again = make(world_size, rank)
        again.load_state_dict(state)
        again.set_epoch(0)
        assert list(again) == left[rank]
    resumed = [make(other, rank) for rank in range(other)]
    for sampler in resumed:
        sampler.load_state_dict(states[0])
    assert sorted(sample for sampler in resumed for sample in sampler) == sorted(
        sample for share in left for sample in share
    )


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
@given(num_samples=st.integers(1, 13), world_size=st.integers(1, 5), start=st.integers(0, 12), tail=TAILS)
def test_ranks_in_step_have_one_state_until_the_shorter_shares_end(subject, num_samples, world_size, start, tail):
    """After the last step that all ranks take, the ranks with one sample more have not used it."""
    samplers = [subject(range(num_samples), world_size, rank, tail=tail) for rank in range(world_size)]
    state = samplers[0].state_dict() | {"position": min(start, num_samples)}
    for sampler in samplers:
        sampler.load_state_dict(state)
    for step, _ in enumerate(zip(*samplers[::-1], strict=False), 1):  # reversed: the last rank ends first
        for sampler in samplers:
            sampler.commit(1)
        states = [sampler.state_dict() for sampler in samplers]
        assert states == states[:1] * world_size
        dropped = tail == "drop" and step == len(samplers[0])
        used = state["position"] + step * world_size
        assert states[0]["position"] == (num_samples if dropped else min(used, num_samples))


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
def test_a_pass_that_was_left_does_not_end_the_next_one(subject):
    sampler = subject(range(9), 2, 1, shuffle=False, tail="uneven")
    left = iter(sampler)
    again = iter(sampler)
    assert list(left) == [1, 3, 5, 7]
    for _ in range(4):
        next(again)
        sampler.commit(1)
    assert sampler.state_dict()["position"] == 8  # rank 0 may still be at its last sample
    assert list(again) == []
    assert sampler.state_dict()["position"] == 9
    sampler.set_epoch(1)
    assert sampler.state_dict()["position"] == 0


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
def test_a_pass_that_was_used_up_is_followed_by_a_whole_one(subject):
    for rank, tail in [(0, "uneven"), (1, "uneven"), (1, "drop"), (1, "pad")]:
        sampler = subject(range(5), 2, rank, shuffle=False, tail=tail)
        whole = list(sampler)
        sampler.commit(len(whole))
        assert list(sampler) == whole
        assert len(sampler) == len(whole)
        sampler.commit(1)
        sampler.set_epoch(0)
        assert list(sampler) == whole[1:]
        sampler.set_epoch(1)
        assert list(sampler) == whole


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
def test_a_tail_that_was_dropped_stays_dropped_on_fewer_ranks(subject):
    four = subject(range(11), 4, 0, tail="drop")
    four.commit(len(four))
    two = subject(range(11), 2, 0, tail="drop")
    two.load_state_dict(four.state_dict())
    assert list(two) == []  # the epoch is over, although two ranks could share three samples
    four = subject(range(5), 4, 0, drop_last=True, tail="drop")
    four.commit(1)
    one = subject(range(5), 1, 0, tail="drop")
    one.load_state_dict(four.state_dict())
    assert list(one) == []


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
def test_an_epoch_that_has_not_begun_is_whole_on_fewer_ranks(subject):
    four = subject(range(3), 4, 0, shuffle=False, tail="drop")  # with no sample for any rank
    one = subject(range(3), 1, 0, shuffle=False, tail="drop")
    one.load_state_dict(four.state_dict())
    assert list(one) == [0, 1, 2]


@pytest.mark.verifies("ShardSampler")
def test_samples_used_before_the_first_pass_are_not_in_it(subject):
    sampler = subject(range(10), 2, 0, shuffle=False)
    sampler.commit(3)
    assert list(sampler) == [6, 8]
    sampler = subject(range(10), 2, 0, shuffle=False)
    sampler.commit(5)
    assert list(sampler) == []


@pytest.mark.if_subject_takes("tail")
@pytest.mark.verifies("ShardSampler")
def test_a_shorter_share_that_is_used_up_without_a_loop_ends_the_epoch(subject):
    sampler = subject(range(11), 4, 3, tail="uneven")
    sampler.commit(2)
    one = subject(range(11), 1, 0, tail="uneven")
    one.load_state_dict(sampler.state_dict())
    assert list(one) == []


@pytest.mark.verifies("ShardSampler")
def test_len_does_not_shrink_while_samples_are_used(subject):
    sampler = subject(range(10), 2, 0)
    lengths = []
    for _ in sampler:
        sampler.commit(1)
        lengths.append(len(sampler))
    assert lengths == [5] * 5


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("ShardSampler")
@pytest.mark.parametrize(
    ("error", "message", "arguments", "keywords"),
    [
        (TypeError, "ShardSampler needs a data set with a length, got Endless", (Endless(), 2, 0), {}),
        (ValueError, r"rank=2, which is outside range\(2\)", (range(3), 2, 2), {}),
        (ValueError, "needs world_size of at least 1, got world_size=0", (range(3), 0, 0), {}),
        (ValueError, "got drop_last=True beside tail='pad'", (range(3), 2, 0), {"drop_last": True, "tail": "pad"}),
        (ValueError, "knows tail 'uneven', 'pad' and 'drop', got 'cut'", (range(3), 2, 0), {"tail": "cut"}),
        (TypeError, "takes seed as an int, got float", (range(3), 2, 0), {"seed": 1.5}),
        (TypeError, "takes seed as an int, got str", (range(3), 2, 0), {"seed": "x", "shuffle": False}),
        (ValueError, "ShardSampler needs a process group", (range(3),), {}),
    ],
)
def test_a_sampler_refuses(subject, error, message, arguments, keywords):
    with pytest.raises(error, match=message):
        subject(*arguments, **keywords)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("ShardSampler")
def test_a_batch_that_is_committed_twice_is_refused(subject):
    sampler = subject(range(10), 2, 0)
    sampler.commit(3)
    with pytest.raises(ValueError, match="commit got 3 samples, but 2 of the pass are left; commit each batch once"):
        sampler.commit(3)
    with pytest.raises(ValueError, match="needs num_samples of at least 0, got num_samples=-1"):
        sampler.commit(-1)
    with pytest.raises(ValueError, match="needs epoch of at least 0, got epoch=-1"):
        sampler.set_epoch(-1)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("ShardSampler")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 9}, "has num_samples=10, the state was saved with num_samples=9: the order would be another"),
        ({"seed": 1}, "has seed=0, the state was saved with seed=1"),
        ({"shuffle": 0}, "has shuffle=1, the state was saved with shuffle=0"),
        ({"version": 2}, "has version=1, the state was saved with version=2"),
        ({"position": 11}, "position 11, expected an epoch from 0 and a position in 0 to 10"),
        ({"position": -1}, "position -1, expected"),
        ({"epoch": -1}, "a state with epoch -1"),
        ({"position": 1.5}, "a state whose 'position' is 1.5, expected a whole number"),
        ({"position": None}, "a state without 'position'; pass what"),
    ],
    ids=lambda value: "-".join(map(str, *value.items())) if isinstance(value, dict) else "",
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(subject, change, message):
    sampler = subject(range(10), 2, 0)
    sampler.commit(1)
    own = sampler.state_dict()
    state = {name: value for name, value in (own | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == own


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("ShardSampler")
@pytest.mark.world_size(2)
def test_every_rank_refuses_the_state_of_other_data(subject, rank):
    with pytest.raises(ValueError, match="ShardSampler has num_samples=8"):
        subject(range(8)).load_state_dict(ShardSampler(range(10)).state_dict())
    dist.barrier()  # no rank was left waiting
