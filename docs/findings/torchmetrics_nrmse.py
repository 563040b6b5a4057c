"""torchmetrics 1.9.0: NormalizedRootMeanSquaredError depends on the number of ranks.

torchrun --nproc-per-node 3 torchmetrics_nrmse.py    # plain gloo; with 2 ranks, all numbers are right
python torchmetrics_nrmse.py                         # check_metric on the simulated cluster: fails
"""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.distributed as dist
from torchmetrics.regression import NormalizedRootMeanSquaredError

from pdlcheck.checks import check_metric
from pdlcheck.worlds import get_world

TARGET = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 9.0])[:, None] * torch.tensor([1.0, 2.0, 4.0, 8.0])
SAMPLES = (TARGET + 1.0, TARGET)  # every error is 1, so the metric is 1 / the mean of the target


def evaluate(preds, target, num_outputs=4, synchronised=True):
    """Return the metric of each output; each rank updates with every world_size-th sample."""
    first, step = (dist.get_rank(), dist.get_world_size()) if synchronised else (0, 1)
    metric = NormalizedRootMeanSquaredError("mean", num_outputs=num_outputs, sync_on_compute=synchronised)
    if first < len(preds):
        metric.update(preds[first::step].squeeze(1), target[first::step].squeeze(1))
    return metric.compute()


def check(num_outputs=4, world_sizes=(3,)):
    """Compare the metric of several ranks with that of one process without synchronisation."""
    check_metric(
        partial(evaluate, num_outputs=num_outputs),
        [one[:, :num_outputs] for one in SAMPLES],
        get_world("sim"),
        world_sizes=world_sizes,
        reference=partial(evaluate, num_outputs=num_outputs, synchronised=False),
    )


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    dist.init_process_group("gloo")
    for outputs in (4, 1):
        samples = [one[:, :outputs] for one in SAMPLES]
        try:
            found = evaluate(*samples, outputs).tolist()
        except IndexError as error:
            found = repr(error)
        if dist.get_rank() == 0:
            print(
                f"{outputs} output(s): {found}, one process: {evaluate(*samples, outputs, synchronised=False).tolist()}"
            )
    dist.destroy_process_group()
