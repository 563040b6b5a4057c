"""Sub-groups, most of them without rank 0, and meshes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..parity import groups, messages
from .entry import WORLD_SIZE, Feature, everywhere, given, mine, of_all

RANKS = range(WORLD_SIZE)
MEMBERS, ROOT = [1, 2, 3], 2


def _empty(*shape):
    return [torch.zeros(shape) for _ in MEMBERS]


def collectives_in_a_group():
    """Call every collective among ``MEMBERS``; roots are global ranks."""
    group = dist.new_group(MEMBERS)
    if dist.get_rank(group) < 0:
        return None
    at_root = dist.get_rank() == ROOT
    seen = {name: mine(3) for name in ("all_reduce", "reduce", "broadcast")}
    dist.all_reduce(seen["all_reduce"], group=group)
    dist.reduce(seen["reduce"], ROOT, group=group)
    dist.broadcast(seen["broadcast"], ROOT, group=group)
    seen |= {"all_gather": _empty(2), "gather": _empty(2) if at_root else None, "all_to_all": _empty(2)}
    dist.all_gather(seen["all_gather"], mine(2), group=group)
    dist.gather(mine(2), seen["gather"], dst=ROOT, group=group)
    dist.all_to_all(seen["all_to_all"], list(mine(3, 2).unbind()), group=group)
    seen |= {name: torch.zeros(2) for name in ("scatter", "reduce_scatter")}
    dist.scatter(seen["scatter"], list(mine(3, 2).unbind()) if at_root else None, src=ROOT, group=group)
    dist.reduce_scatter(seen["reduce_scatter"], list(mine(3, 2).unbind()), group=group)
    if not at_root:
        seen["reduce"] = None
    return seen


def collectives_in_a_group_alone():
    def of_group(*shape):
        return [given(rank, *shape) for rank in MEMBERS]

    results = [None] * WORLD_SIZE
    for place, rank in enumerate(MEMBERS):
        at_root = rank == ROOT
        results[rank] = {
            "all_reduce": sum(of_group(3)),
            "reduce": sum(of_group(3)) if at_root else None,
            "broadcast": given(ROOT, 3),
            "all_gather": of_group(2),
            "gather": of_group(2) if at_root else None,
            "all_to_all": [x[place] for x in of_group(3, 2)],
            "scatter": given(ROOT, 3, 2)[place],
            "reduce_scatter": sum(of_group(3, 2))[place],
        }
    return results


def messages_in_a_group():
    """Send along a ring, with neighbours by their rank in the group."""
    group = dist.new_group(MEMBERS)
    place = dist.get_rank(group)
    if place < 0:
        return None
    x, y = mine(3), torch.zeros(3)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, group_peer=(place + 1) % 3),
            dist.P2POp(dist.irecv, y, group=group, group_peer=(place - 1) % 3),
        ]
    )
    for work in works:
        work.wait()
    return y


def two_groups_of_the_same_ranks():
    one, other = dist.new_group(), dist.new_group()
    x, y = mine(2), mine(3)
    works = [dist.all_reduce(x, group=one, async_op=True), dist.all_reduce(y, group=other, async_op=True)]
    for work in reversed(works):
        work.wait()
    return x, y


def averaged_over_a_mesh():
    """Take the mean over one dimension of a 2 x 2 mesh, then the sum over the other."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    x = mine(3)
    dist.all_reduce(x, op=dist.ReduceOp.AVG, group=mesh.get_group("rows"))
    dist.all_reduce(x, group=mesh.get_group("columns"))
    return x


def averaged_over_a_mesh_alone():
    means = [(given(column, 3) + given(column + 2, 3)) / 2 for column in (0, 1)]
    return everywhere(means[0] + means[1])


def _on(**values):
    return [values.get(f"rank_{rank}") for rank in RANKS]


def _pairs():
    """Return the sums of overlapping_groups; rank r is in the groups r and r - 1."""
    sums = [float(rank + (rank + 1) % 4) for rank in RANKS]
    return [[sums[g] if rank in (g, (g + 1) % 4) else None for g in RANKS] for rank in RANKS]


FEATURES = [
    Feature("collectives in a sub-group without rank 0", collectives_in_a_group, collectives_in_a_group_alone),
    Feature(
        "batch_isend_irecv in a sub-group without rank 0",
        messages_in_a_group,
        lambda: [None, given(3, 3), given(1, 3), given(2, 3)],
    ),
    Feature(
        "send, recv by the number in a sub-group",
        messages.by_the_number_in_a_group,
        lambda: _on(rank_3=(1, 4.0)),
    ),
    Feature(
        "roots by their number in a sub-group",
        groups.roots_by_their_number_in_the_group,
        lambda: [None, (2.0, None), (2.0, None), (2.0, 6.0)],
    ),
    Feature("overlapping sub-groups", groups.overlapping_groups, _pairs),
    Feature("sub-groups of one rank", groups.group_of_one, lambda: [float(rank) for rank in RANKS]),
    Feature(
        "two groups of the same ranks",
        two_groups_of_the_same_ranks,
        lambda: everywhere((sum(of_all(2)), sum(of_all(3)))),
    ),
    Feature(
        "new_subgroups",
        groups.subgroups_of_two,
        lambda: [(1.0 if r < 2 else 5.0, (r % 2, 2, [0, 1] if r < 2 else [2, 3]), 2) for r in RANKS],
    ),
    Feature(
        "new_subgroups_by_enumeration",
        groups.subgroups_by_enumeration,
        lambda: [(3.0, (place, 2, pair)) for place, pair in [(0, [0, 3]), (0, [1, 2]), (1, [1, 2]), (1, [0, 3])]],
    ),
    Feature(
        "new_group, use_local_synchronization",
        groups.group_that_only_its_members_make,
        lambda: _on(rank_1=(4.0, (0, 2, [1, 3])), rank_3=(4.0, (1, 2, [1, 3]))),
    ),
    Feature(
        "destroy_process_group of a sub-group",
        groups.end_of_a_group,
        lambda: _on(rank_0=(2.0, 4.0), rank_1=4.0, rank_2=(2.0, 4.0), rank_3=4.0),
    ),
    Feature("DeviceMesh, 2 x 2", averaged_over_a_mesh, averaged_over_a_mesh_alone),
    Feature("DeviceMesh, flattened", groups.flattened_mesh, lambda: everywhere((6.0, 4))),
]
