"""torchmetrics 1.9.0: two states that cannot be synchronised.

torchrun --nproc-per-node 2 torchmetrics_states.py exact_match    # raises on every rank
torchrun --nproc-per-node 2 torchmetrics_states.py no_batch       # ends with SIGABRT
python torchmetrics_states.py                                     # both on the simulated cluster
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torchmetrics.classification import BinaryAUROC, MulticlassExactMatch

from pdlcheck.worlds import get_world


def exact_match():
    """Return which samples match exactly; the state ``total`` is an int64 mean over ranks."""
    metric = MulticlassExactMatch(num_classes=2, multidim_average="samplewise")
    metric.update(torch.tensor([[0, 1], [1, 1]]), torch.tensor([[0, 1], [0, 1]]))
    return metric.compute().tolist()


def no_batch(all_have_one=False):
    """Return the area under the curve of all samples, where the last rank has no batch."""
    metric = BinaryAUROC()
    if all_have_one or dist.get_rank() < dist.get_world_size() - 1:
        metric.update(torch.tensor([0.2, 0.8]), torch.tensor([0, 1]))
    return metric.compute().item()


if __name__ == "__main__":
    programs = {one.__name__: one for one in (exact_match, no_batch)}
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        print(dist.get_rank(), programs[sys.argv[1]](), flush=True)
        dist.destroy_process_group()
    else:
        for program in programs.values():
            try:
                get_world("sim").run(program, world_size=2)
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
        sys.exit(1)
