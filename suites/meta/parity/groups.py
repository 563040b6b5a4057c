"""Process groups and meshes: their ranks, the order of ranks, ways to make them, and the contents of the store."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store


def _sum(group, value=None):
    x = torch.tensor([float(dist.get_rank() if value is None else value)])
    dist.all_reduce(x, group=group)
    return x.item()


def _about(group):
    return dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)


def group_without_rank_0():
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return dist.get_rank(group)
    x, out = torch.tensor([float(dist.get_rank())]), torch.zeros(1)
    dist.broadcast(x, 3, group=group)
    dist.scatter(out, list(torch.arange(3.0).split(1)) if dist.get_rank() == 2 else None, src=2, group=group)
    return x.item(), out.item(), _sum(group), _about(group)


def group_in_another_order():
    group = dist.new_group([3, 0, 2])
    if dist.get_rank() == 1:
        return None
    out = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(out, torch.tensor([float(dist.get_rank())]), group=group)
    piece = torch.zeros(1)
    dist.reduce_scatter_tensor(piece, torch.arange(3.0), group=group)
    return [x.item() for x in out], piece.item(), _about(group)


def numbers_of_ranks_in_groups():
    group = dist.new_group([3, 1])
    if dist.get_rank() % 2 == 0:
        return None
    return [dist.get_group_rank(group, r) for r in (1, 3)], [dist.get_global_rank(group, r) for r in (0, 1)]


def roots_by_their_number_in_the_group():
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return None
    x = torch.tensor([float(dist.get_rank())])
    dist.broadcast(x, group=group, group_src=1)
    y = torch.tensor([float(dist.get_rank())])
    dist.reduce(y, group=group, group_dst=2)
    return x.item(), y.item() if dist.get_rank() == 3 else None


def overlapping_groups():
    groups = [dist.new_group([r, (r + 1) % 4]) for r in range(4)]
    return [_sum(groups[r]) if dist.get_rank() in (r, (r + 1) % 4) else None for r in range(4)]


def group_of_one():
    groups = [dist.new_group([r]) for r in range(4)]
    return _sum(groups[dist.get_rank()])


def two_groups_of_the_same_ranks():
    one, other = dist.new_group([0, 1, 2, 3]), dist.new_group()
    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    works = [dist.all_reduce(x, group=one, async_op=True), dist.all_reduce(y, group=other, async_op=True)]
    for work in reversed(works):
        work.wait()
    return x.item(), y.item()


def subgroups_of_two():
    mine, every = dist.new_subgroups(2)
    return _sum(mine), _about(mine), len(every)


def subgroups_by_enumeration():
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])
    return _sum(mine), _about(mine)


def group_that_only_its_members_make():
    if dist.get_rank() not in (1, 3):
        return None
    group = dist.new_group([1, 3], use_local_synchronization=True)
    return _sum(group), _about(group)


def end_of_a_group():
    group = dist.new_group([0, 2])
    if dist.get_rank() % 2 == 0:
        before = _sum(group)
        dist.destroy_process_group(group)
        return before, _sum(None, 1)
    return _sum(None, 1)


def barrier_of_a_group():
    group = dist.new_group([2, 3])
    if dist.get_rank() > 1:
        dist.barrier(group)
        dist.monitored_barrier(group)
    return dist.is_initialized()


def mesh_of_one_dimension():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    return _sum(mesh.get_group("data")), mesh.get_rank(), mesh.size(), mesh.get_coordinate()


def mesh_of_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return (
        _sum(mesh.get_group("data")),
        _sum(mesh["model"].get_group()),
        mesh.get_local_rank("data"),
        mesh.get_local_rank("model"),
        dist.get_process_group_ranks(mesh.get_group("data")),
        mesh.mesh.tolist(),
    )


def flattened_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    flat = mesh["a", "b"]._flatten("all")
    return _sum(flat.get_group()), flat.size()


def default_group_of_a_script():
    dist.init_process_group("gloo")
    return _sum(None)


# -- the store -------------------------------------------------------------------------------------


def _store(name):
    return dist.PrefixStore(name, _get_default_store())


def store_of_values():
    store = _store("values")
    store.set(f"of {dist.get_rank()}", str(dist.get_rank() ** 2))
    store.wait([f"of {r}" for r in range(4)])
    return [store.get(f"of {r}") for r in range(4)]


def store_that_counts():
    store = _store("counts")
    store.add("all", dist.get_rank() + 1)
    dist.barrier()
    return store.add("all", 0), store.get("all")


def store_of_the_first():
    store = _store("first")
    if dist.get_rank() == 0:
        before = store.compare_set("key", "", "a")
        return before, store.compare_set("key", "b", "c"), store.compare_set("key", "a", "d"), store.get("key")
    return None


def store_that_forgets():
    store = _store("forgets")
    if dist.get_rank() == 1:
        store.set("key", "value")
        before = store.check(["key"])
        return before, store.delete_key("key"), store.check(["key"]), store.delete_key("key")
    return None


def store_of_many():
    store = _store("many")
    if dist.get_rank() == 3:
        store.multi_set(["a", "b"], ["1", "2"])
        return store.multi_get(["b", "a"])
    return store.get("a")


def store_that_appends():
    store = _store("appends")
    if dist.get_rank() == 0:
        store.append("key", "ab")
        store.append("key", "cd")
        return store.get("key")
    return None


def store_with_a_wait_that_ends():
    store = _store("waits")
    if dist.get_rank() == 0:
        dist.barrier()
        store.set("late", b"\x00\xff")
    else:
        dist.barrier()
        store.wait(["late"], timedelta(seconds=20))
    return store.get("late")


def store_of_a_group():
    group = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        group.get_group_store().set(f"of {dist.get_rank()}", "mine")
        return group.get_group_store().get(f"of {2 - dist.get_rank()}")
    return None


def numbers_of_operations():
    group, x, rank = dist.new_group([0, 1]), torch.ones(4), dist.get_rank()
    world = dist.group.WORLD
    before = world._get_sequence_number_for_group()
    dist.all_reduce(x)
    dist.broadcast(x, 2)
    dist.barrier()
    if rank < 2:
        dist.all_reduce(x, group=group)
    if rank in (1, 2):
        (dist.send if rank == 1 else dist.recv)(x, 3 - rank)
    dist.all_to_all_single(torch.zeros(4), x)
    own = group._get_sequence_number_for_group() if rank < 2 else None
    return world._get_sequence_number_for_group() - before, own
