"""Groups: the ranks that make them and use them, and the numbers of their ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock

from .entry import fault


def reduced(group):
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x, group=group)
    return x.item()


@fault(Deadlock, world_size=3, says="rank 0 has returned and will not take part", source="fairseq2 PR #562")
def made_by_its_members_alone(right):
    """The ranks of a group make it, the others do not."""
    members = [1, 2]
    if not right and dist.get_rank() not in members:
        return None
    group = dist.new_group(members)  # blocks
    return reduced(group) if dist.get_rank() in members else None


@fault(CollectiveMismatch, world_size=3, fields={"what": "the ranks of the group"})
def made_in_another_order(right):
    """The groups are made in the order of a set, which differs from rank to rank."""
    pairs = [(0, 1), (0, 2)]
    made = {}
    for pair in pairs if right or dist.get_rank() == 0 else pairs[::-1]:
        made[pair] = dist.new_group(pair)  # differs
    return [reduced(made[pair]) for pair in pairs if dist.get_rank() in pair]


@fault(CollectiveMismatch, world_size=4, fields={"what": "the ranks of the group"})
def made_of_other_ranks(right):
    """Each rank lists the ranks of its own group only, so the calls name different groups."""
    rank = dist.get_rank()
    mine = [rank // 2 * 2, rank // 2 * 2 + 1]
    if right:
        group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    else:
        group = dist.new_group(mine)  # differs
    return reduced(group)


@fault(Deadlock, world_size=3)
def made_locally_by_one_member(right):
    """With local synchronisation all members must make the group; one of them does not."""
    if dist.get_rank() == 1 or (dist.get_rank() == 2 and not right):
        return None
    return reduced(dist.new_group([0, 2], use_local_synchronization=True))  # blocks


@fault(CollectiveMismatch, world_size=3, fields={"what": "the group"})
def used_by_a_rank_outside(right):
    """All ranks reduce over a group that one of them is not in: torch warns, and leaves its tensor as it is."""
    group = dist.new_group([0, 1])
    x = torch.ones(1)
    if not right or dist.get_rank() != 2:
        dist.all_reduce(x, group=group)  # differs
    return x.item()


@fault(Deadlock, world_size=4, source="sglang PR #14202; tiledarray PR #571")
def messages_by_group_ranks(right):
    """The peer is counted within the group, but send and recv take global ranks."""
    group = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return None
    x = torch.full((1,), float(dist.get_rank()))
    peer = 1 - dist.get_rank(group)
    if right:
        peer = dist.get_global_rank(group, peer)
    if dist.get_rank() == 3:
        dist.send(x, peer)  # blocks
    else:
        dist.recv(x, peer)  # blocks
    return x.item()


@fault(ValueError, world_size=4, source="sglang PR #14196; GauXC PR #217")
def root_by_its_group_rank(right):
    """The root is rank 0 of the group; as a global rank it is no member, which torch says."""
    group = dist.new_group([2, 3])
    x = torch.full((1,), float(dist.get_rank()))
    if dist.get_rank() >= 2:
        dist.broadcast(x, src=2 if right else 0, group=group)  # raises
    return x.item()


@fault(CollectiveMismatch, world_size=4, fields={"what": "the root"}, source="sglang PR #14202; MPICH #1940")
def root_mixed_of_both_numbers(right):
    """One branch passes the root's number in the group, the other its global rank, and both are members."""
    group = dist.new_group([1, 2, 3])
    x = torch.full((1,), float(dist.get_rank()))
    if dist.get_rank() == 0:
        return None
    if dist.get_rank() == 2 or right:
        dist.broadcast(x, src=2, group=group)  # differs
    else:
        dist.broadcast(x, src=1, group=group)  # differs
    return x.item()


@fault(Deadlock, world_size=3)
def default_group_in_the_place_of_a_sub_group(right):
    """The group is forgotten in one call, so that a part of the ranks reduces over all of them."""
    group = dist.new_group([0, 1])
    x = torch.ones(1)
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=group if right else None)  # blocks
    return x.item()


@fault(Deadlock, world_size=3)
def sub_group_on_some_of_its_ranks(right):
    """One rank reduces over the sub-group, its peer over the default group."""
    group = dist.new_group([0, 1])
    x = torch.ones(1)
    dist.all_reduce(x, group=group if dist.get_rank() == 0 or (right and dist.get_rank() == 1) else None)  # blocks
    if right and dist.get_rank() < 2:
        dist.all_reduce(x)
    return x.item()
