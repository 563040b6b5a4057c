"""Process groups on simulated ranks: the ranks that make them and may use them, and the names of groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock
from pdlcheck.worlds import get_world


def run(program, *args, world_size=3):
    return get_world("sim").run(program, *args, world_size=world_size)


def total(group=None):
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x, group=group)
    return x.item()


# -- a group is made by all ranks, in one order ---------------------------------------------------


def made_by_some(right):
    if right or dist.get_rank() in (1, 2):
        group = dist.new_group([1, 2])
        return total(group) if dist.get_rank() in (1, 2) else None
    return None


def made_in_two_orders(right):
    if right or dist.get_rank() == 0:
        first, _ = dist.new_group([0, 1]), dist.new_group([0, 2])
    else:
        _, first = dist.new_group([0, 2]), dist.new_group([0, 1])
    return total(first) if dist.get_rank() in (0, 1) else None


def made_by_members_that_say_so(right):
    if dist.get_rank() in (0, 2) if right else dist.get_rank() == 0:
        return total(dist.new_group([0, 2], use_local_synchronization=True))
    return None


def used_by_all(right):
    group = dist.new_group([0, 1])
    return total(group) if not right or dist.get_rank() in (0, 1) else None


def test_a_group_that_some_ranks_do_not_make_is_a_deadlock():
    with pytest.raises(Deadlock, match="rank 0 has returned and will not take part") as caught:
        run(made_by_some, False)
    assert "blocked in new_group(1, 2)" in caught.value.ranks[1]
    assert "test_groups.py:" in caught.value.ranks[1]
    assert "new_group is for all ranks to call, also for those that are not in the group; with use" in str(caught.value)
    assert run(made_by_some, True) == [None, 5.0, 5.0]


def test_groups_made_in_another_order_are_a_mismatch():
    with pytest.raises(CollectiveMismatch, match=r"make different groups: new_group\(0, [12]\) and") as caught:
        run(made_in_two_orders, False)
    assert "new_group(0, 1)" in caught.value.ranks[0]
    assert "new_group(0, 2)" in caught.value.ranks[1]
    assert run(made_in_two_orders, True) == [3.0, 3.0, None]


def test_with_local_synchronisation_the_members_alone_make_a_group():
    assert run(made_by_members_that_say_so, True) == [4.0, None, 4.0]
    with pytest.raises(Deadlock, match=r"blocked in new_group\(0, 2\)") as caught:
        run(made_by_members_that_say_so, False)
    assert "all ranks" not in str(caught.value)


def test_a_rank_that_uses_a_group_it_is_not_in_is_told():
    with pytest.raises(CollectiveMismatch, match="rank 2 calls all_reduce on a group that it is not in") as caught:
        run(used_by_all, False)
    assert caught.value.what == "the group"
    assert "test_groups.py:" in caught.value.ranks[0]
    assert run(used_by_all, True) == [3.0, 3.0, None]


# -- any name gives the simulated backend ---------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl", None])
def test_a_program_that_makes_its_own_default_group_gets_the_simulated_one(backend):
    def script():
        dist.init_process_group(backend, init_method="tcp://10.0.0.1:29500", rank=dist.get_rank(), world_size=3)
        sums = total(), total(dist.new_group([0, 1, 2], backend=backend))
        dist.destroy_process_group()
        return sums

    with get_world("sim").open(3) as ranks:
        for _ in range(2):
            assert ranks.run(script) == [(6.0, 6.0)] * 3


def test_a_group_may_be_ended_and_made_again():
    def script():
        rank = dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=3)
        return total(), dist.get_rank() == rank

    assert run(script) == [(6.0, True)] * 3


def test_a_second_default_group_is_refused_as_torch_does():
    def script():
        dist.init_process_group("gloo")
        dist.init_process_group("gloo")

    with pytest.raises(ValueError, match="trying to initialize the default process group twice"):
        run(script)


def test_a_rank_that_is_not_its_own_is_refused():
    with pytest.raises(ValueError, match="on a rank whose world_size is 3"):
        run(lambda: dist.init_process_group("gloo", rank=dist.get_rank(), world_size=5))


# -- operations -----------------------------------------------------------------------------------


def test_premul_sum_multiplies_each_rank_by_its_own_factor():
    def program():
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(10.0 ** dist.get_rank()))
        return x.item()

    assert run(program) == [321.0] * 3


def test_monitored_barrier_names_the_rank_that_does_not_come():
    def program(missing):
        if dist.get_rank() != missing:
            dist.monitored_barrier()

    run(program, None)
    with pytest.raises(Deadlock, match="rank 1 has returned and will not take part"):
        run(program, 1)


def test_the_store_counts_deletes_and_compares():
    def program():
        store = dist.distributed_c10d._get_default_store()
        before = store.num_keys()
        if dist.get_rank() == 0:
            store.set("key", "1")
            store.append("key", "2")
            store.compare_set("key", "12", "3")
            seen = store.get("key"), store.num_keys() - before, store.delete_key("key"), store.delete_key("key")
            assert seen == (b"3", 1, True, False)
        store.add("arrived", 1)
        while store.add("arrived", 0) < 3:
            store.check(["arrived"])
        return store.check(["key"])

    assert run(program) == [False] * 3
