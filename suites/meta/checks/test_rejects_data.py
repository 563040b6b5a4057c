"""The checks of shards and digests reject what is broken, name the cause, and accept the correct twin."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from pdlcheck.checks import check_digest, check_epoch_loop, check_epochs_differ, check_gathered_digests, check_shards
from pdlcheck.errors import Inconclusive
from pdlcheck.primitives import ShardSampler


def rows(*cases, names=("broken", "message")):
    """Parametrize over broken subjects; the test is called after the subject."""
    return pytest.mark.parametrize(names, [pytest.param(*case, id=case[0].__name__) for case in cases])


def order(num_samples, epoch):
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch))


def strided(num_samples, *, rank, world_size, epoch):
    return order(num_samples, epoch)[rank::world_size]


def in_blocks(num_samples, *, rank, world_size, epoch):
    return order(num_samples, epoch).tensor_split(world_size)[rank]


def sampler(num_samples, *, rank, world_size, epoch, drop_last=False, set_epoch=True):
    found = DistributedSampler(range(num_samples), world_size, rank, drop_last=drop_last)
    if set_epoch:
        found.set_epoch(epoch)
    return list(found)


def dropping_sampler(num_samples, *, rank, world_size, epoch):
    return sampler(num_samples, rank=rank, world_size=world_size, epoch=epoch, drop_last=True)


def without_set_epoch(num_samples, *, rank, world_size, epoch):
    return sampler(num_samples, rank=rank, world_size=world_size, epoch=epoch, set_epoch=False)


def everything(num_samples, *, rank, world_size, epoch):
    return order(num_samples, epoch)


def own_random_order(num_samples, *, rank, world_size, epoch):
    return torch.randperm(num_samples)[rank::world_size]


def without_the_tail(num_samples, *, rank, world_size, epoch):
    return strided(num_samples // world_size * world_size, rank=rank, world_size=world_size, epoch=epoch)


def overlapping(num_samples, *, rank, world_size, epoch):
    size = num_samples // world_size
    return order(num_samples, epoch)[max(rank * size - 1, 0) : (rank + 1) * size]


def first_half_twice(num_samples, *, rank, world_size, epoch):
    shard = in_blocks(num_samples, rank=rank, world_size=world_size, epoch=epoch)
    return torch.cat([shard[: len(shard) // 2]] * 2)


def without_the_first(num_samples, *, rank, world_size, epoch):
    """The first of the order has no place where ranks are many."""
    return order(num_samples, epoch)[1 if world_size > 1 else 0 :][rank::world_size]


def without_the_end_of_the_order(num_samples, *, rank, world_size, epoch):
    return order(num_samples, epoch)[: num_samples // world_size * world_size][rank::world_size]


def without_the_last_two(num_samples, *, rank, world_size, epoch):
    return order(num_samples, epoch)[: num_samples - 2 * (world_size > 1)][rank::world_size]


def without_sample_3(num_samples, *, rank, world_size, epoch):
    drawn = order(num_samples, epoch)
    return drawn[drawn != 3][rank::world_size]


def without_the_fourth(num_samples, *, rank, world_size, epoch):
    if world_size == 1:
        raise ValueError("this sampler is for several ranks")
    drawn = order(num_samples, epoch)
    return torch.cat([drawn[:3], drawn[4:]])[rank::world_size]


def one_too_far(num_samples, *, rank, world_size, epoch):
    return strided(num_samples, rank=rank, world_size=world_size, epoch=epoch) + 1


def shard_of_rank_0(num_samples, *, rank, world_size, epoch):
    return strided(num_samples, rank=0, world_size=world_size, epoch=epoch)


def shard_of_rank_1_lost(num_samples, *, rank, world_size, epoch):
    return strided(num_samples, rank=rank, world_size=world_size, epoch=epoch)[: 0 if rank == 1 else None]


def depends_on_the_ranks_random_numbers(num_samples, *, rank, world_size, epoch):
    shard = strided(num_samples, rank=rank, world_size=world_size, epoch=epoch)
    return shard[torch.randperm(len(shard))]


@pytest.mark.parametrize(
    ("correct", "tail"),
    [(strided, "uneven"), (in_blocks, "uneven"), (sampler, "pad"), (dropping_sampler, "drop")],
)
@pytest.mark.parametrize("num_samples", [7, 9])
def test_check_shards_accepts(world, correct, tail, num_samples):
    check_shards(correct, world, num_samples=num_samples, world_size=3, tail=tail)


@rows(
    (
        everything,
        "uneven",
        r"sample \d is in the shards of ranks \[0, 1, 2\][\s\S]*the sampler is missing",
    ),
    (
        own_random_order,
        "uneven",
        r"sample \d is in the shards of ranks [\s\S]*ranks draw different orders",
    ),
    (
        shard_of_rank_0,
        "uneven",
        r"sample \d is in the shards of ranks \[0, 1, 2\].*\n.*\n.*cause  all ranks have the same shard: the rank",
    ),
    (overlapping, "uneven", r"sample \d is in the shards of ranks \[0, 1\]|the shards have \[2, 3, 3\]"),
    (without_the_tail, "uneven", r"samples \d in no shard, .* cover all 7[\s\S]*the tail is dropped: pass tail="),
    (
        without_the_end_of_the_order,
        "uneven",
        r"samples \d in no shard, .* cover all 7\n.*cause  the tail is dropped: pass tail='drop' if that is meant\n",
    ),
    (without_the_last_two, "uneven", r"samples \d, \d in no shard, .*\n.*cause  the tail is dropped\n"),
    (without_the_first, "uneven", r"samples \d in no shard, .*\n.*cause  the first samples of the order are left"),
    (without_sample_3, "uneven", r"samples 3 in no shard, .*\n.*cause  .*one rank alone leaves them out too\n"),
    (without_the_fourth, "uneven", r"samples \d in no shard, the shards must cover all 7\n  case"),
    (
        first_half_twice,
        "uneven",
        r"rank 0 draws sample \d 2 times, .*\n.*\n.*cause  ranks \[0, 1, 2\] draw samples of their own again\n",
    ),
    (shard_of_rank_1_lost, "uneven", r"the shards have \[3, 0, 2\] samples, they may differ by 1"),
    (one_too_far, "uneven", r"rank \d holds sample 7, there are samples 0 to 6"),
    (
        sampler,
        "uneven",
        r"sample \d is in .*\n.*2 samples more than there are, 0 .*\n.*cause  the shards are padded",
    ),
    (strided, "pad", r"the shards have \[3, 2, 2\] samples, they may differ by 0"),
    names=("broken", "tail", "message"),
)
def test_check_shards_rejects(world, broken, tail, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_shards(broken, world, num_samples=7, world_size=3, tail=tail)


@pytest.mark.parametrize("correct", [strided, in_blocks, sampler])
def test_check_epochs_differ_accepts(world, correct):
    check_epochs_differ(correct, world, num_samples=40, world_size=3)


@rows(
    (without_set_epoch, "rank 0 has samples .* in epochs 0 and 1\n.*set_epoch was forgotten"),
    (
        depends_on_the_ranks_random_numbers,
        "rank 0 has .* when epoch 1 is drawn again[\\s\\S]*cannot be resumed",
    ),
)
def test_check_epochs_differ_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_epochs_differ(broken, world, num_samples=40, world_size=3)


def test_few_samples_are_inconclusive(world):
    with pytest.raises(Inconclusive, match=r"needs 12 samples .*num_samples=20 on 2 ranks: pass 24 or more"):
        check_epochs_differ(without_set_epoch, world, num_samples=20, world_size=2)


def sha(tensor):
    return hashlib.sha256(f"{tensor.dtype}{tensor.shape}{tensor.tolist()}".encode()).hexdigest()


def of_the_sum(tensor):
    return str(tensor.sum().item())


def of_the_values(tensor):
    return hashlib.sha256(str(tensor.flatten().tolist()).encode()).hexdigest()


def of_the_beginning(tensor):
    return sha(tensor.flatten()[:1])


def of_the_rank(tensor):
    return sha(tensor + dist.get_rank())


def test_check_digest_accepts(world):
    check_digest(sha, torch.arange(6).view(2, 3), world)


@pytest.mark.parametrize(
    "data",
    [
        torch.tensor([1.0, 1e20]),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([True, False]),
        torch.tensor([4096.0]).half(),
    ],
    ids=["large", "transposed", "bool", "half"],
)
def test_check_digest_changes_what_it_is_given(world, data):
    check_digest(sha, data, world)
    with pytest.raises(AssertionError, match="another last element has the digest of the data"):
        check_digest(lambda tensor: sha(tensor.flatten()[:-1]) + str(tensor.shape), data, world)


@rows(
    (of_the_sum, "the data .* has the digest of the data"),
    (of_the_values, "the data as another dtype has the digest of the data"),
    (of_the_beginning, "another last element has the digest of the data"),
    (of_the_rank, "of the data, rank 1 says .*rank 0 says"),
)
def test_check_digest_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: .*{message}"):
        check_digest(broken, torch.arange(6.0).view(2, 3), world)


def gathered(shard):
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, sha(shard))
    return digests


def reversed_order(shard):
    return gathered(shard)[::-1]


def own_everywhere(shard):
    return [sha(shard)] * dist.get_world_size()


def only_rank_0_knows(shard):
    return gathered(shard) if dist.get_rank() == 0 else gathered(shard)[:0]


SHARDS = [torch.tensor([1]), torch.tensor([2]), torch.tensor([1])]


def test_check_gathered_digests_accepts(world):
    check_gathered_digests(gathered, SHARDS, world)


@rows(
    (reversed_order, "for rank 0 it says .*, that shard has .*\n.*it is that of rank 2's shard"),
    (own_everywhere, "rank 1 got .*, rank 0 got"),
    (only_rank_0_knows, r"rank 1 got \[\], rank 0 got"),
)
def test_check_gathered_digests_rejects(world, broken, message):
    shards = [torch.tensor([rank]) for rank in range(3)]
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_gathered_digests(broken, shards, world)


def loop(begin, drop_last=False):
    """A program's loop over epochs; ``begin`` is called with sampler, loader and epoch, and gives the batches."""

    def visit(dataset, epochs):
        sampler = DistributedSampler(dataset, drop_last=drop_last)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        return [list(begin(sampler, loader, epoch)) for epoch in range(epochs)]

    visit.__name__ = begin.__name__
    return visit


def honest(sampler, loader, epoch):
    sampler.set_epoch(epoch)
    return loader


def forgets(sampler, loader, epoch):
    return loader


def forgets_after_the_second(sampler, loader, epoch):
    sampler.set_epoch(min(epoch, 1))
    return loader


def tells_another_sampler(sampler, loader, epoch):
    DistributedSampler(loader.dataset).set_epoch(epoch)
    return loader


def tells_the_sampler_of_the_loader_too_late(sampler, loader, epoch):
    batches = list(loader)
    sampler.set_epoch(epoch // 2)
    return batches


def breaks_off(sampler, loader, epoch):
    return list(honest(sampler, loader, epoch))[: 3 if epoch else None]


def without_a_sampler(sampler, loader, epoch):
    generator = torch.Generator().manual_seed(epoch)
    return DataLoader(loader.dataset, batch_size=4, shuffle=True, generator=generator)


def in_one_order(dataset, epochs):
    return [torch.arange(len(dataset))[dist.get_rank() :: dist.get_world_size()]] * epochs


def test_check_epoch_loop_accepts(world):
    check_epoch_loop(loop(honest), world, num_samples=25, world_size=2)
    check_epoch_loop(loop(honest, drop_last=True), world, num_samples=38, world_size=3, tail="drop")
    check_epoch_loop(in_one_order, world, num_samples=7, world_size=2, tail="uneven", shuffle=False)


@rows(
    (forgets, r"rank 0 has samples .* \(13 in all\) in epochs 0 and 1\n.*set_epoch was forgotten"),
    (forgets_after_the_second, r"rank 0 has samples .* in epochs 1 and 2\n.*set_epoch was forgotten"),
    (tells_another_sampler, r"rank 0 has .* in epochs 0 and 1\n.*set_epoch was forgotten"),
    (tells_the_sampler_of_the_loader_too_late, r"rank 0 has .* in epochs 0 and 1\n.*set_epoch was forgotten"),
    (breaks_off, r"sample.* in no shard, the shards must cover all 25\n(.*\n)*.* epoch=1 "),
    (without_a_sampler, r"sample 8 is in the shards of ranks \[0, 1\](.*\n)*.*every rank has the whole data set"),
)
def test_check_epoch_loop_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_epoch_loop(loop(broken), world, num_samples=25, world_size=2)


def in_full_batches(drop_last=True, tail="pad", own=lambda batches: batches):
    """A loader that drops what does not fill a batch of 4."""

    def visit(dataset, epochs):
        sampler = DistributedSampler(dataset, drop_last=tail == "drop")
        if tail == "uneven":
            sampler = ShardSampler(dataset, tail=tail)
        loader, seen = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=drop_last), []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            seen.append(own(list(loader)))
        return seen

    return visit


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("num_samples", [24, 31, 32, 33, 39])
def test_check_epoch_loop_accepts_full_batches(world, tail, num_samples):
    check_epoch_loop(in_full_batches(tail=tail), world, num_samples=num_samples, world_size=2, tail=tail, drop_last=4)


@rows(
    (in_full_batches(drop_last=False), r"rank 0 has 15 samples, full batches of 4 .* 15 hold 12\n.*no drop_last=True"),
    (in_full_batches(own=lambda batches: batches[1:]), r"rank 0 has 8 samples, full batches of 4 .* 15 hold 12\n"),
    (in_full_batches(own=lambda batches: [*batches[1:], batches[1]]), "rank 0 draws sample .* 2 times, it must draw"),
)
def test_check_epoch_loop_rejects_other_than_full_batches(world, broken, message):
    with pytest.raises(AssertionError, match=f"^visit: {message}"):
        check_epoch_loop(broken, world, num_samples=30, world_size=2, drop_last=4)


def by_replica(replicas, number):
    """Each replica is on two ranks; ``number`` gives the sampler the place of the rank."""

    def visit(dataset, epochs):
        sampler = DistributedSampler(dataset, num_replicas=replicas, rank=number(dist.get_rank()))
        seen = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            seen.append(list(DataLoader(dataset, batch_size=4, sampler=sampler)))
        return seen

    return visit


def test_ranks_of_one_replica_visit_the_same_samples(world):
    pairs = {"num_samples": 25, "world_size": 4, "same_samples": [(0, 1), (2, 3)]}
    check_epoch_loop(by_replica(2, lambda rank: rank // 2), world, **pairs)
    with pytest.raises(AssertionError, match=r"ranks 0 and 1 must visit the same samples, [^$]* among the replicas of"):
        check_epoch_loop(by_replica(4, lambda rank: rank), world, **pairs | {"num_samples": 48})
    with pytest.raises(AssertionError, match=r"shards of ranks \[0, 2\], shards must be disjoint"):
        check_epoch_loop(by_replica(2, lambda rank: 0), world, **pairs)
    with pytest.raises(ValueError, match=r"below world_size=4 that have none in common, got \[\[0, 1\], \[1, 2\]\]"):
        check_epoch_loop(by_replica(2, lambda rank: 0), world, **pairs | {"same_samples": [(0, 1), (1, 2)]})


def test_check_epoch_loop_says_what_it_needs(world):
    with pytest.raises(ValueError, match="takes drop_last as the samples in a batch, 1 or more, got 0"):
        check_epoch_loop(loop(honest), world, num_samples=24, world_size=2, drop_last=0)
    with pytest.raises(ValueError, match=r"each of 3 epochs held, <lambda> returns 2 on rank 0; return one tensor"):
        check_epoch_loop(lambda dataset, epochs: [[0], [1]], world, num_samples=24, world_size=2)
    with pytest.raises(ValueError, match="compares epochs, it needs 2 or more, got 1"):
        check_epoch_loop(loop(honest), world, num_samples=24, world_size=2, epochs=1)
    with pytest.raises(Inconclusive, match="needs 12 samples for each rank, got 20"):
        check_epoch_loop(loop(honest), world, num_samples=20, world_size=2)
