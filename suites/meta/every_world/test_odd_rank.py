"""If ranks meet and do not match, the verdict waits for all of them, and names the one that differs."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.worlds import get_world
from pdlcheck.worlds.observe import Matcher, Signature
from pdlcheck.worlds.simulated import SimulatedWorld


def shapes(sizes):
    dist.all_reduce(torch.ones(sizes[dist.get_rank()]))


def one_gathers(odd):
    x = torch.ones(2)
    if dist.get_rank() == odd:
        dist.all_gather([torch.empty(2) for _ in range(dist.get_world_size())], x)
    else:
        dist.all_reduce(x)


@pytest.mark.parametrize("odd", range(4))
def test_the_rank_that_differs_from_all_others_comes_first(world, odd):
    others = ", ".join(str(rank) for rank in range(4) if rank != odd)
    others = {"1, 2, 3": "1-3", "0, 1, 2": "0-2"}.get(others, others)
    text = (
        rf"^rank {odd} and ranks {others} met in collective 0 of .* differ in the operation: all_gather and all_reduce"
    )
    with pytest.raises(CollectiveMismatch, match=text) as caught:
        world.run(one_gathers, odd, world_size=4)
    assert caught.value.odd == [odd]
    assert [line[:7] for line in caught.value.ranks] == [f"rank {rank}:" for rank in range(4)]
    world.run(one_gathers, -1, world_size=4)


@pytest.mark.parametrize("on", ["sim", "gloo"])
def test_the_line_that_is_shown_is_that_of_the_rank_that_differs(run, on):
    result = run(
        """
@pytest.mark.parametrize("odd", range(4))
@pytest.mark.world_size(4)
def test_one_gathers(rank, odd):
    x = torch.ones(2)
    if rank == odd:
        dist.all_gather([torch.empty(2) for _ in range(4)], x)
    else:
        dist.all_reduce(x)
""",
        world=on,
    )
    assert result.stdout.str().count(">           dist.all_gather(") == 4
    result.stdout.no_fnmatch_line(">           dist.all_reduce(*")


@pytest.mark.parametrize(
    ("sizes", "words", "odd"),
    [
        ((3, 4), r"ranks 0 and 1 met in .* the shape: \(3,\) and \(4,\)", []),
        ((3, 4, 3, 4), r"ranks 0, 2 and ranks 1, 3 met in .* the shape: \(3,\) and \(4,\)", []),
        ((3, 3, 4, 5), r"rank 2, rank 3 and ranks 0, 1 met in .* the shape: \(4,\), \(5,\) and \(3,\)", []),
        ((1, 2, 3), r"ranks 0, 1 and 2 met in .* the shape: \(1,\), \(2,\) and \(3,\)", []),
        ((1, 2, 3, 4, 5), r"ranks 0, 1, 2, 3, \.\.\. met in .* the shape: \(1,\), \(2,\), \(3,\), \(4,\), \.\.\.", []),
        ((3, 3, 3, 5, 5), r"ranks 3, 4 and ranks 0-2 met in .* the shape: \(5,\) and \(3,\)", [3, 4]),
    ],
)
def test_several_that_differ(world, sizes, words, odd):
    with pytest.raises(CollectiveMismatch, match=words) as caught:
        world.run(shapes, sizes, world_size=len(sizes))
    assert caught.value.odd == odd


def sooner_or_later(rank_that_stays_away, otherwise):
    rank = dist.get_rank()
    if rank == rank_that_stays_away:
        otherwise()
    else:
        shapes((3, 4, 3))


def waits_for_a_message():
    dist.recv(torch.empty(1), 0)


@pytest.mark.parametrize("otherwise", [lambda: None, waits_for_a_message], ids=["has returned", "waits"])
def test_who_cannot_come_is_not_waited_for(world, otherwise):
    with pytest.raises(CollectiveMismatch, match=r"ranks 0 and 1 met in .* the shape: \(3,\) and \(4,\)") as caught:
        world.run(sooner_or_later, 2, otherwise, world_size=3)
    assert [line[:7] for line in caught.value.ranks] == ["rank 0:", "rank 1:"]


def test_a_rank_that_fails_meanwhile_hides_nothing():
    def body():
        if dist.get_rank() == 2:
            raise LookupError("no such sample")
        shapes((3, 4))

    with pytest.raises(LookupError) as caught:
        SimulatedWorld(schedule="first").run(body, world_size=3)
    assert "rank 1 raised CollectiveMismatch: ranks 0 and 1 met in collective 0" in "\n".join(caught.value.__notes__)


def test_a_rank_that_fails_meanwhile_hides_nothing_on_processes_either(tmp_path):
    posted = tmp_path / "posted"

    def body():
        rank = dist.get_rank()
        if rank == 2:
            while not posted.exists():
                time.sleep(0.001)
            time.sleep(0.3)  # shorter than the time that the others have to report their operations
            raise LookupError("no such sample")
        work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
        if rank == 1:
            posted.touch()
        work.wait()

    with pytest.raises((LookupError, CollectiveMismatch)) as caught:
        get_world("gloo").run(body, world_size=3)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "ranks 0 and 1 met in collective 0" in told


def test_a_rank_that_is_busy_for_ever_elsewhere_is_not_waited_for():
    def body():
        rank = dist.get_rank()
        pair = dist.new_group([2, 3], use_local_synchronization=True) if rank > 1 else None
        while pair is not None:
            dist.all_reduce(torch.ones(1), group=pair)
        dist.all_reduce(torch.ones(3 + rank))

    for name in ("sim", "gloo"):
        with pytest.raises(
            CollectiveMismatch, match=r"ranks 0 and 1 met in collective 0 .* the shape: \(3,\) and \(4,\)"
        ):
            get_world(name).run(body, world_size=4)


@pytest.mark.parametrize("seed", range(20))
def test_the_words_are_those_of_every_schedule(seed):
    with pytest.raises(CollectiveMismatch) as first:
        SimulatedWorld(schedule="first").run(one_gathers, 2, world_size=4)
    with pytest.raises(CollectiveMismatch) as caught:
        SimulatedWorld(seed=seed).run(one_gathers, 2, world_size=4)
    assert str(caught.value) == str(first.value)


def posted(rank, op="all_reduce", shape=(3,), splits=((), ())):
    return Signature(rank, op, "0", (0, 1, 2), 0, (shape,), ("float32",), reduce_op="SUM", splits=splits)


def post_all(matcher, signatures):
    for key, signature in enumerate(signatures):
        matcher.post(signature, key)


@pytest.mark.parametrize(
    "signatures",
    [
        [posted(0), posted(1, shape=(4,)), posted(2)],
        [posted(0), posted(1), posted(2, op="reduce")],
        [posted(0, shape=(1,)), posted(1, shape=(2,)), posted(2)],
        [posted(rank, "all_to_all", splits=((1, 1, 1), (1, 1 + (rank == 0), 1))) for rank in range(3)],
    ],
    ids=["shape", "operation", "all", "split"],
)
def test_the_verdict_does_not_depend_on_who_comes_first(signatures):
    said = set()
    for order in itertools.permutations(signatures):
        matcher = Matcher()
        with pytest.raises(CollectiveMismatch) as caught:
            post_all(matcher, order)
        assert matcher.is_mismatched(signatures[0])
        assert matcher.missing(signatures[0]) == ()
        said.add(str(caught.value))
    assert len(said) == 1


def test_ranks_that_fit_spoil_nothing():
    matcher = Matcher()
    assert [matcher.post(posted(rank), rank) is None for rank in range(3)] == [True, True, False]
    assert not matcher.is_mismatched(posted(0))
    assert matcher.verdict() is None
