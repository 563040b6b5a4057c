"""The checks of shards and digests reject broken ones, name the cause, and accept the correct twin."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from pdlcheck.checks import check_digest, check_epochs_differ, check_gathered_digests, check_shards
from pdlcheck.errors import Inconclusive


def rows(*cases, names=("broken", "message")):
    """Parametrize a test over broken subjects; the id of each case is the name of its subject."""
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
    """Leave out the first sample of the order if there are several ranks."""
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


def nothing_at_all(num_samples, *, rank, world_size, epoch):
    return torch.tensor([], dtype=torch.int64)


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
    (nothing_at_all, "uneven", r"samples 0, 1, 2, 3, 4, 5, .*7 in all.* in no shard, .*\n.*cause  no known cause fits"),
    (without_the_last_two, "uneven", r"samples \d, \d in no shard, .*\n.*cause  the tail is dropped\n"),
    (without_the_first, "uneven", r"samples \d in no shard, .*\n.*cause  the first samples of the order are left"),
    (without_sample_3, "uneven", r"samples 3 in no shard, .*\n.*cause  .*one rank alone leaves them out too\n"),
    (
        without_the_fourth,
        "uneven",
        r"samples \d in no shard, the shards must cover all 7\n  likely cause  no known ",
    ),
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
