"""pytorch-metric-learning 2.9.0: the gradient of a loss's own parameters is world_size times too large.

torchrun --nproc-per-node 2 proxies_gradient.py    # plain gloo, under DDP
python proxies_gradient.py                         # check_gradients_equal_single_process: fails
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_gradients_equal_single_process
from pdlcheck.worlds import get_world

LABELS = torch.arange(3)
NAMES = ("ArcFaceLoss", "CosFaceLoss", "ProxyNCALoss", "ProxyAnchorLoss", "NormalizedSoftmaxLoss", "SoftTripleLoss")


class EmbeddingAndLoss(nn.Module):
    """An embedding and its loss, so that DDP averages the gradients of both; returns the loss of its samples."""

    def __init__(self, name="ArcFaceLoss"):
        super().__init__()
        self.embedding = nn.Linear(5, 6)
        kinds = {"ContrastiveLoss": {}}
        self.loss = getattr(losses, name)(**kinds.get(name, {"num_classes": 3, "embedding_size": 6}))

    def forward(self, samples):
        loss = DistributedLossWrapper(self.loss) if dist.is_initialized() else self.loss
        return loss(self.embedding(samples), LABELS.repeat(len(samples) // 3))


def shards(world_size):
    return torch.randn(world_size, 3, 5, generator=torch.Generator().manual_seed(0))


def gradients(model, samples):
    """Return the gradients of the loss of ``samples``, by the names of the parameters."""
    model(samples).backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def average(model, num_samples):
    """Average the gradients over ranks, as DDP does."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def check(name="ArcFaceLoss"):
    """Compare the gradients on two ranks with those of one process on all samples."""
    pairs = [(samples, torch.zeros(3)) for samples in shards(2)]
    check_gradients_equal_single_process(
        lambda: EmbeddingAndLoss(name), lambda outputs, _: outputs, pairs, average, get_world("sim")
    )


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    samples = shards(int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    models = {name: EmbeddingAndLoss(name) for name in NAMES}
    alone = {name: gradients(model, samples.flatten(0, 1)) for name, model in models.items()}
    dist.init_process_group("gloo")
    for name, model in models.items():
        model.zero_grad()
        found = gradients(DistributedDataParallel(model), samples[dist.get_rank()])
        ratios = [(found[key] / alone[name][key]).median().item() for key in alone[name]]
        if dist.get_rank() == 0:
            print(name, *(f"{key} {ratio:.3f}" for key, ratio in zip(found, ratios, strict=True)), flush=True)
    dist.barrier()
    dist.destroy_process_group()
