"""The check of a loop over epochs rejects broken loops, names the cause, and accepts the correct twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from pdlcheck.checks import check_epoch_loop
from pdlcheck.errors import Inconclusive
from pdlcheck.primitives import ShardSampler


def rows(*cases, names=("broken", "message")):
    """Parametrize a test over broken subjects; the id of each case is the name of its subject."""
    return pytest.mark.parametrize(names, [pytest.param(*case, id=case[0].__name__) for case in cases])


def loop(begin, drop_last=False):
    """Return a program's loop over epochs; ``begin(sampler, loader, epoch)`` returns the batches of an epoch."""

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


def counts_within_a_cycle(sampler, loader, epoch):
    sampler.set_epoch(epoch % 2)
    return loader


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
    (counts_within_a_cycle, r"rank 0 has .* in epochs 0 and 2\n.*comes again after 2 epochs: the number that reaches"),
    (breaks_off, r"sample.* in no shard, the shards must cover all 25\n(.*\n)*.* epoch=1 "),
    (without_a_sampler, r"sample 8 is in the shards of ranks \[0, 1\](.*\n)*.*every rank has the whole data set"),
)
def test_check_epoch_loop_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_epoch_loop(loop(broken), world, num_samples=25, world_size=2)


def in_full_batches(drop_last=True, tail="pad", own=lambda batches: batches):
    """Return a loop whose loader drops an incomplete batch of fewer than 4 samples."""

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


@pytest.mark.parametrize(
    ("epoch_of", "told"),
    [
        (
            lambda epoch: 0,
            r"set_epoch was forgotten; every epoch drops the same: samples [\d, ]+\n",
        ),
        (lambda epoch: min(epoch, 1), r"set_epoch was forgotten\n"),
    ],
    ids=["one order", "two orders"],
)
def test_samples_that_every_epoch_drops_are_named(world, epoch_of, told):
    def visit(dataset, epochs):
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
        seen = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch_of(epoch))
            seen.append(list(loader))
        return seen

    with pytest.raises(AssertionError, match=f"likely cause  .*{told}"):
        check_epoch_loop(visit, world, num_samples=30, world_size=2, drop_last=4)


def dealt(tail, batch_size=4, wrong=False):
    """Return a loop that deals whole batches of an epoch to the ranks in turn.

    The last round is padded with the first samples, dropped, or left as it is.
    """

    def visit(dataset, epochs):
        rank, world_size, seen = dist.get_rank(), dist.get_world_size(), []
        for epoch in range(epochs):
            order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch)).tolist()
            a_round = batch_size * world_size
            if tail == "drop":
                order = order[: len(order) // a_round * a_round]
            if tail == "pad":
                order += order[: -len(order) % a_round + (a_round if wrong else 0)]
            batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
            seen.append(batches[rank::world_size])
        return seen

    return visit


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("num_samples", [32, 33, 41, 47])
def test_check_epoch_loop_accepts_batches_that_are_dealt(world, tail, num_samples):
    check_epoch_loop(dealt(tail), world, num_samples=num_samples, world_size=2, tail=tail, dealt_in=4)


def test_check_epoch_loop_says_what_to_pass_for_batches_that_are_dealt(world):
    told = (
        "all samples come, 7 of them again, as where the last batch .* pass dealt_in=, the samples in one, such as 4;"
    )
    with pytest.raises(AssertionError, match=told):
        check_epoch_loop(dealt("pad"), world, num_samples=41, world_size=2)
    with pytest.raises(AssertionError, match=r"they may differ by 0\n.*if they have as many, .* pass tail='uneven'"):
        check_epoch_loop(dealt("uneven"), world, num_samples=45, world_size=2, dealt_in=4)


@rows(
    (dealt("pad", wrong=True), "pad", 33, "repeated +15 samples more than there are, 7 allowed"),
    (dealt("pad", batch_size=8), "pad", 33, "repeated +15 samples more than there are, 7 allowed"),
    (dealt("drop", batch_size=6), "drop", 45, "the shards must cover all 45"),
    (dealt("uneven", batch_size=6), "uneven", 42, r"the shards have \[24, 18\] samples, they may differ by 4"),
    names=("broken", "tail", "num_samples", "message"),
)
def test_check_epoch_loop_rejects_batches_that_are_dealt_otherwise(world, broken, tail, num_samples, message):
    with pytest.raises(AssertionError, match=message):
        check_epoch_loop(broken, world, num_samples=num_samples, world_size=2, tail=tail, dealt_in=4)


def by_replica(replicas, number):
    """Return a loop in which ``number(rank)`` gives the replica of a rank to the sampler."""

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
    told = (
        r"the ranks of each of \[\(0, 1\), \(2, 3\)\] have the same samples in one order: right if each holds one "
        r"replica of the model, as in tensor parallelism: pass same_samples=\[\(0, 1\), \(2, 3\)\]\n"
    )
    with pytest.raises(AssertionError, match=told):
        check_epoch_loop(by_replica(2, lambda rank: rank // 2), world, num_samples=48, world_size=4)
    with pytest.raises(ValueError, match=r"below world_size=4 that have none in common, got \[\[0, 1\], \[1, 2\]\]"):
        check_epoch_loop(by_replica(2, lambda rank: 0), world, **pairs | {"same_samples": [(0, 1), (1, 2)]})


def test_check_epoch_loop_says_what_it_needs(world):
    with pytest.raises(ValueError, match="takes drop_last as the samples in a batch, 1 or more, got 0"):
        check_epoch_loop(loop(honest), world, num_samples=24, world_size=2, drop_last=0)
    with pytest.raises(ValueError, match=r"each of 3 epochs held, <lambda> returns 2 on rank 0; return one tensor"):
        check_epoch_loop(lambda dataset, epochs: [[0], [1]], world, num_samples=24, world_size=2)
    with pytest.raises(ValueError, match=r"dealt_in as the samples in a batch, 1 or more, .* got 4 and 4; for"):
        check_epoch_loop(loop(honest), world, num_samples=24, world_size=2, dealt_in=4, drop_last=4)
    with pytest.raises(ValueError, match="compares epochs, it needs 2 or more, got 1"):
        check_epoch_loop(loop(honest), world, num_samples=24, world_size=2, epochs=1)
    with pytest.raises(Inconclusive, match=r"needs 12 samples for each of 2 .* got num_samples=20; pass 24 or more"):
        check_epoch_loop(loop(honest), world, num_samples=20, world_size=2)


def collated(collate, begin=honest):
    """Return a loop whose batches ``collate`` makes from lists of samples."""

    def visit(dataset, epochs):
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=collate)
        return [list(begin(sampler, loader, epoch)) for epoch in range(epochs)]

    return visit


BATCHES = {
    "dicts": lambda samples: {"id": torch.tensor(samples)},
    "dicts of equals": lambda samples: {"ids": torch.tensor(samples), "labels": samples},
    "arrays": np.array,
    "tuples of numbers of arrays": lambda samples: tuple(np.array(samples)),
}


@pytest.mark.parametrize("collate", BATCHES.values(), ids=BATCHES)
def test_batches_may_be_dicts_and_arrays(world, collate):
    check_epoch_loop(collated(collate), world, num_samples=25, world_size=2)
    with pytest.raises(AssertionError, match=r"^visit: rank 0 has .* in epochs 0 and 1\n.*set_epoch was forgotten"):
        check_epoch_loop(collated(collate, forgets), world, num_samples=25, world_size=2)


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda samples: {"x": [2 * i for i in samples], "id": samples}, "entries 'x' and 'id' of the dict .* return"),
        (lambda samples: [str(i) for i in samples], "visit returned a str in an epoch; have it return the numbers of"),
        (lambda samples: {}, "visit returned a dict in an epoch; have it return the numbers of the samples"),
    ],
    ids=["unlike entries", "texts", "nothing"],
)
def test_batches_that_do_not_say_their_samples_are_refused(world, collate, message):
    with pytest.raises(TypeError, match=f"check_epoch_loop .*{message}"):
        check_epoch_loop(collated(collate), world, num_samples=25, world_size=2)


def by_workers(*, share):
    """Return a loop over an iterable data set, whose workers share their rank's samples, or each yield all of them."""

    class Stream(IterableDataset):
        def __init__(self, dataset, epoch):
            self.dataset, self.epoch = dataset, epoch

        def __iter__(self):
            worker, count = get_worker_info(), dist.get_world_size()
            order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.epoch)).tolist()
            own = order[dist.get_rank() :: count]
            return iter(own[worker.id :: worker.num_workers] if share else own)

    def visit(dataset, epochs):
        loaders = [DataLoader(Stream(dataset, epoch), batch_size=4, num_workers=2) for epoch in range(epochs)]
        return [[batch.tolist() for batch in loader] for loader in loaders]

    return visit


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")
def test_workers_that_do_not_share_the_samples_of_their_rank_are_told(world):
    check_epoch_loop(by_workers(share=True), world, num_samples=40, world_size=2)
    told = r"each rank has each of its samples 2 times: the workers of its loader, if there are 2, do not share them"
    with pytest.raises(AssertionError, match=told):
        check_epoch_loop(by_workers(share=False), world, num_samples=40, world_size=2)
