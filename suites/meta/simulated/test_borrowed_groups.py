"""A simulated rank that posts on a group object of another rank is told so: a deadlock of one group made no sense."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Unsupported
from pdlcheck.worlds import get_world

GROUPS = {}


def in_a_global():
    """As parallel_state modules keep them: each process has its own."""
    GROUPS["data"] = dist.new_group([0, 1])
    dist.barrier()  # by now the other rank has put its own there
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


def test_processes_have_globals_of_their_own():
    assert get_world("gloo").run(in_a_global, world_size=2) == [[2, 2]] * 2
