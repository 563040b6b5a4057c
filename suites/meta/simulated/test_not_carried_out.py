"""If torch cannot process the tensors of an operation, every rank gets the error, and no rank's data changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Unsupported
from pdlcheck.worlds import get_world


def adds(dtype, told):
    x = torch.ones(2, dtype=dtype) if dtype.is_floating_point else torch.empty(2, dtype=dtype)
    try:
        dist.all_reduce(x)
    except Unsupported as error:
        told.append((dist.get_rank(), str(error)))
        raise
    return x.tolist()


def test_each_rank_is_told():
    told = []
    assert get_world("sim").run(lambda: adds(torch.bfloat16, told), world_size=3) == [[3, 3]] * 3
    with pytest.raises(Unsupported, match=r"carry out all_reduce\(SUM\) of bits8 .*not implemented"):
        get_world("sim").run(lambda: adds(torch.bits8, told), world_size=3)
    assert sorted(rank for rank, _ in told) == [0, 1, 2]
