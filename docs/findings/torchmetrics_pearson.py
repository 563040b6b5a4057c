"""torchmetrics 1.9.0: PearsonCorrCoef is NaN if the predictions of each rank are constant.

torchrun --nproc-per-node 3 torchmetrics_pearson.py    # plain gloo
python torchmetrics_pearson.py                         # check_metric on the simulated cluster: fails
"""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.distributed as dist
from torchmetrics import regression

from pdlcheck.checks import check_metric
from pdlcheck.worlds import get_world

# Every third sample goes to the same rank, so each rank has one value of the predictions.
BY_CLASS = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0]), torch.tensor([1.1, 1.9, 3.2, 0.8, 2.2, 2.9])
ONE_EACH = torch.tensor([0.3, 0.9, 0.4]), torch.tensor([0.1, 0.7, 0.9])
NAMES = ("PearsonCorrCoef", "ConcordanceCorrCoef")


def evaluate(preds, target, name="PearsonCorrCoef", synchronised=True):
    """Return the coefficient; each rank updates with every world_size-th sample."""
    first, step = (dist.get_rank(), dist.get_world_size()) if synchronised else (0, 1)
    metric = getattr(regression, name)(sync_on_compute=synchronised)
    if first < len(preds):
        metric.update(preds[first::step], target[first::step])
    return float(metric.compute())


def check(samples=BY_CLASS, name="PearsonCorrCoef"):
    """Compare the metric of three ranks with that of one process without synchronisation."""
    check_metric(
        partial(evaluate, name=name),
        samples,
        get_world("sim"),
        world_sizes=(3,),
        reference=partial(evaluate, name=name, synchronised=False),
    )


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    dist.init_process_group("gloo")
    for name in NAMES:
        for dealt, samples in (("constant on each rank", BY_CLASS), ("one sample each", ONE_EACH)):
            found, alone = evaluate(*samples, name), evaluate(*samples, name, synchronised=False)
            if dist.get_rank() == 0:
                print(f"{name}, {dealt}: {found:.4f}, one process: {alone:.4f}")
    dist.destroy_process_group()
