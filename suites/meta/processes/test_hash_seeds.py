"""Ranks that are processes hash strings differently, as on a cluster, but in the same way in a replay."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.worlds import check_same_on_worlds, get_world
from pdlcheck.worlds.processes.controller.hash_seeds import hash_seed, hash_seeds

NAMES = {f"layer {number}" for number in range(12)}


@pytest.fixture(scope="module")
def gloo():
    world = get_world("gloo")
    yield world
    world.close()


def hashes():
    return hash("weight"), os.environ.get("PYTHONHASHSEED")


def reduce_each(names):
    for name in names:
        dist.all_reduce(torch.ones(int(name.split()[1]) + 1))


def in_the_order_of_a_set():
    reduce_each(NAMES)


def in_an_order_of_its_own():
    reduce_each(sorted(NAMES))


def test_ranks_beside_one_another_hash_strings_in_other_ways(gloo):
    one, two, three, four = gloo.run(hashes, world_size=4)
    assert one[0] != two[0]
    assert three[0] != four[0]
    assert two[0] != three[0]
    assert {variable for _, variable in (one, two, three, four)} == {None}, "what a rank starts has a seed of its own"


def test_fresh_ranks_do_so_too():
    world = get_world("gloo", isolation="fresh")
    assert len({number for number, _ in world.run(hashes, world_size=2)}) == 2


def in_other_shapes():
    names = sorted(NAMES)
    for name in names:
        dist.all_reduce(torch.ones(int(name.split()[1]) + 1 + dist.get_rank()))


def test_collectives_in_the_order_of_a_set_do_not_meet(gloo):
    with pytest.raises(CollectiveMismatch) as caught:
        gloo.run(in_the_order_of_a_set, world_size=2)
    assert "posts in the order of a set: `for name in names` at " in "".join(caught.value.__notes__)
    gloo.run(in_an_order_of_its_own, world_size=2)


def test_a_mismatch_in_another_loop_is_not_put_on_a_set(gloo):
    with pytest.raises(CollectiveMismatch) as caught:
        gloo.run(in_other_shapes, world_size=2)
    assert "of a set" not in "".join(getattr(caught.value, "__notes__", ()))


def reduced_in_the_order_of_a_list_of_a_set():
    reduced, order = {}, list(NAMES)
    for name in order:
        reduced[name] = torch.tensor(int(name.split()[1]))
        dist.all_reduce(reduced[name])
    return sorted((name, value.item()) for name, value in reduced.items())


def in_the_main_thread():
    reduce_each(sorted(NAMES))
    return threading.current_thread() is threading.main_thread()


@pytest.mark.slow
def test_worlds_that_differ_by_an_order_of_hashes_say_so(gloo):
    with pytest.raises(AssertionError) as caught:
        check_same_on_worlds(reduced_in_the_order_of_a_list_of_a_set, world_size=2, worlds=(get_world("sim"), gloo))
    assert (
        "likely cause  the order of a set, or another result of hashes: simulated ranks share them, and each process "
        "has its own; with one hash seed for all ranks gloo ends as sim does"
    ) in str(caught.value)


@pytest.mark.slow
def test_worlds_that_differ_otherwise_do_not_say_so(gloo):
    with pytest.raises(AssertionError, match="not module globals") as caught:
        check_same_on_worlds(in_the_main_thread, world_size=2, worlds=(get_world("sim"), gloo))
    assert "hash" not in str(caught.value)


SOURCE = """
from pdlcheck.worlds import get_world
from pdlcheck.worlds.processes.controller import forkserver
forkserver.start(seed={seed})
world = get_world("gloo")
print(world.run(lambda: hash("weight"), world_size=2))
world.close()
"""


def printed(seed, chosen="random"):
    done = subprocess.run(
        [sys.executable, "-c", SOURCE.format(seed=seed)],
        env=os.environ | {"PYTHONHASHSEED": chosen},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [int(number) for number in done.stdout.strip("[]\n").split(",")]


@pytest.mark.slow
def test_a_replay_hashes_in_the_same_way_and_another_seed_in_another():
    first = printed(0)
    assert printed(0) == first
    assert not set(printed(1)) & set(first)


@pytest.mark.slow
def test_the_seed_of_the_environment_is_that_of_all_ranks():
    one, two = printed(0, chosen="5")
    assert one == two


def test_seeds_are_given_to_two_processes_here_and_to_one_in_a_launch(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert hash_seeds(3, None) == hash_seeds(3, 1) == [""]
    for unset in ("", "random"):  # as Python interprets them
        monkeypatch.setenv("PYTHONHASHSEED", unset)
        assert hash_seeds(0, None) == ["1", "2"]
    monkeypatch.delenv("PYTHONHASHSEED")
    assert hash_seeds(0, None) == ["1", "2"]
    assert hash_seeds(0, 7) == ["8"]
    numbers = {hash_seed(seed, rank) for seed in range(5) for rank in range(100)}
    assert len(numbers) == 500
    assert "0" not in numbers
    assert all(0 < int(hash_seed(seed, 1)) < 2**32 for seed in (2**31, 2**32, 2**40))
