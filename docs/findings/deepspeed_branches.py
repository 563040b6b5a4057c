"""DeepSpeed 0.19.8: ZeRO 1 and 2 add up gradients of different parameters where ranks use different branches.

torchrun --nproc-per-node 2 deepspeed_branches.py    # plain gloo
python deepspeed_branches.py                         # check_same_trajectory on the simulated cluster: fails
"""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_same_trajectory
from pdlcheck.worlds import get_world

deepspeed.comm.torch.build_shm_op = lambda: None  # it needs a compiler, and is not used here


class Branches(nn.Module):
    """Two layers of one shape, of which a forward pass uses one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in range(2)])

    def forward(self, samples, branch):
        return self.layers[branch](samples).mean()


def batch(step):
    return torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(step))


def train(model, steps, stage=1, same_branch=False):
    """Train with DeepSpeed; each rank uses the layer of its own number unless ``same_branch``."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config, dist_init_required=False)
    for step in range(steps):
        engine.backward(engine(batch(step)[dist.get_rank()], 0 if same_branch else dist.get_rank()))
        engine.step()


def one_process(model, steps, same_branch=False):
    for step in range(steps):
        losses = [model(samples, 0 if same_branch else rank) for rank, samples in enumerate(batch(step))]
        model.zero_grad()
        (sum(losses) / 2).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data -= parameter.grad


def check(training=train, reference=one_process):
    """Compare two ranks with one process that computes both branches."""
    world = get_world("sim", own_globals=["deepspeed.comm.comm", "deepspeed.utils.groups"])
    check_same_trajectory(training, reference, Branches, world, dtype=torch.float32, steps=2)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    dist.init_process_group("gloo")
    for stage in (None, 0, 1, 2):
        torch.manual_seed(0)
        model = Branches()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        one_process(model, 1) if stage is None else train(model, 1, stage)
        moved = [(one - other).flatten().tolist() for one, other in zip(model.parameters(), before, strict=True)]
        if dist.get_rank() == 0:
            shown = [[round(value, 3) for value in each] for each in moved]
            print(f"{'one process' if stage is None else f'stage {stage}'}: {shown}", flush=True)
        dist.barrier()
    os._exit(0)
