"""``gather_single`` and ``gather_into_tensor``, since torch 2.14: a ``gather`` into one tensor."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from pdlcheck.operations.flat import parts_of_output
from pdlcheck.operations.gather import GATHER
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.operation import Part

__all__ = ["gather_single"]


def gather_single(group: Group, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
    """Post a ``gather`` into one tensor."""
    opts = opts or dist.GatherOptions()
    own = opts.rootRank == group.rank()  # on other ranks the output is empty and not used
    parts = [Part([input], parts_of_output(group, output, input, "gather_single") if own else [])]
    return group.post_collective(_SINGLE, parts, (output, input, opts), compare=[input], root=opts.rootRank)


_SINGLE = Method("gather_single", function=gather_single, copies=True)
GATHER.add(_SINGLE, Method("gather_into_tensor", function=gather_single, copies=True))
