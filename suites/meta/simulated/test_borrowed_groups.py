"""A simulated rank that uses another rank's group object gets an error, instead of a meaningless deadlock."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Unsupported
from pdlcheck.worlds import get_world

GROUPS = {}


def in_a_global():
    """Keep a group in a global, as parallel_state modules do; each process has its own."""
    GROUPS["data"] = dist.new_group([0, 1])
    dist.barrier()  # by now the other rank has stored its own there
    return _total(GROUPS["data"])


def in_a_global_by_rank():
    GROUPS[dist.get_rank()] = dist.new_group([0, 1])
    dist.barrier()
    return _total(GROUPS[dist.get_rank()])


def _total(group):
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    return total.tolist()


def test_the_rank_that_made_the_group_and_the_cure_are_named():
    words = r"rank (\d) posts all_reduce\(SUM\) of float32 \(2,\).* group 1 \(ranks 0, 1\) that rank (?!\1)\d made, at "
    with pytest.raises(Unsupported, match=words) as raised:
        get_world("sim").run(in_a_global, world_size=2)
    assert "simulated ranks share module globals" in str(raised.value)
    assert "run on processes (--world gloo)" in str(raised.value)


def test_a_group_of_each_ranks_own_is_no_borrowed_one():
    assert get_world("sim").run(in_a_global_by_rank, world_size=2) == [[2, 2]] * 2


def with_a_kept_group(new):
    """Keep a group in a program's cache that outlives the test."""
    if dist.get_rank() not in GROUPS:
        GROUPS[dist.get_rank()] = dist.new_group([0, 1]) if new else dist.group.WORLD
    return _total(GROUPS[dist.get_rank()])


@functools.lru_cache
def kept_by_a_cache(rank):
    return dist.new_group([0, 1])


def with_a_cached_group():
    return _total(kept_by_a_cache(dist.get_rank()))


def then_fails():
    GROUPS[dist.get_rank()] = dist.group.WORLD
    if dist.get_rank() == 1:
        raise ValueError("in the midst of it")
    dist.barrier()


@pytest.mark.parametrize("new", [False, True])
def test_a_group_of_an_earlier_run_is_told(new):
    GROUPS.clear()
    world = get_world("sim")
    assert world.run(with_a_kept_group, new, world_size=2) == [[2, 2]] * 2
    named = rf"globals of {__name__} for itself|globals of .*, {__name__}"
    with pytest.raises(Unsupported, match=r"made in an earlier run, at .*begin each run with new groups") as raised:
        world.run(with_a_kept_group, new, world_size=3)
    assert re.search(named, str(raised.value))


def test_a_group_in_a_cache_of_functions_is_told_with_its_module():
    kept_by_a_cache.cache_clear()
    GROUPS.clear()
    world = get_world("sim")
    assert world.run(with_a_cached_group, world_size=2) == [[2, 2]] * 2
    with pytest.raises(Unsupported, match=rf"made in an earlier run, .*{__name__}"):
        world.run(with_a_cached_group, world_size=2)
    kept_by_a_cache.cache_clear()
    assert world.run(with_a_cached_group, world_size=2) == [[2, 2]] * 2
    kept_by_a_cache.cache_clear()


def test_a_group_from_before_a_failure_is_told_on_the_same_ranks():
    GROUPS.clear()
    with get_world("sim").open(2) as ranks:
        with pytest.raises(ValueError, match="in the midst of it"):
            ranks.run(then_fails)
        with pytest.raises(Unsupported, match="made in an earlier run"):
            ranks.run(with_a_kept_group, False)
        GROUPS.clear()
        assert ranks.run(with_a_kept_group, True) == [[2, 2]] * 2
        assert ranks.run(with_a_kept_group, True) == [[2, 2]] * 2  # the ranks are the same, and so are their groups


def test_processes_have_globals_of_their_own():
    assert get_world("gloo").run(in_a_global, world_size=2) == [[2, 2]] * 2


def asked_about(ask, *args):
    """Call ``ask`` as helpers of parallel_state modules do before any operation."""
    if args == ("own",):
        group = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        return ask(group)
    GROUPS.setdefault("data", dist.group.WORLD)
    dist.barrier()
    return ask(GROUPS["data"])


def global_rank(group):
    return dist.get_global_rank(group, 0)


@pytest.mark.slow
@pytest.mark.parametrize("ask", [dist.get_rank, dist.get_process_group_ranks, dist.get_backend, global_rank])
def test_a_group_that_torch_does_not_know_is_told_with_who_made_it(ask):
    GROUPS.clear()
    for made in (r"by rank \d", "in an earlier run"):
        with pytest.raises((ValueError, KeyError)) as raised:
            get_world("sim").run(asked_about, ask, world_size=2)
        notes = "\n".join(raised.value.__notes__)
        assert re.search(rf"this object of the group was made {made}: simulated .*{__name__}.*--world gloo", notes)
    with pytest.raises((ValueError, KeyError)) as raised:
        get_world("sim").run(asked_about, ask, "own", world_size=2)
    assert "this object" not in "\n".join(raised.value.__notes__)
    GROUPS.clear()
