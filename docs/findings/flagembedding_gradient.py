"""FlagEmbedding 1.4.2: with negatives_cross_device, gradients are world_size times too small.

torchrun --nproc-per-node 2 flagembedding_gradient.py    # plain gloo, under DDP
python flagembedding_gradient.py                         # check_gradients_equal_single_process: fails
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_gradients_equal_single_process
from pdlcheck.worlds import get_world

FILE = "abc/finetune/embedder/AbsModeling.py"


def modeling():
    """Load the one file that defines the loss, as the whole package does not import with transformers 5.24.0."""
    folder = importlib.util.find_spec("FlagEmbedding").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("flagembedding_modeling", Path(folder) / FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Embedder(modeling().AbsEmbedderModel):
    """An embedder with a linear model; ``forward`` and the loss over all ranks are those of the library."""

    def __init__(self, cross_device):
        super().__init__(nn.Linear(5, 6), negatives_cross_device=cross_device)

    def encode(self, features):
        return self.model(features)

    def compute_score(self, queries, passages):
        return queries @ passages.T

    def compute_loss(self, scores, target):
        return nn.functional.cross_entropy(scores, target)

    def save(self, output_dir):
        raise NotImplementedError


class EmbeddingAndLoss(nn.Module):
    """Returns the loss of pairs of a query and a passage."""

    def __init__(self):
        super().__init__()
        self.embedder = Embedder(cross_device=False)

    def forward(self, pairs):
        if dist.is_initialized():
            embedder = Embedder(cross_device=True)
            embedder.model = self.embedder.model
            return embedder(*pairs.unbind(1)).loss
        return self.embedder(*pairs.unbind(1)).loss


def shards(world_size):
    return torch.randn(world_size, 3, 2, 5, generator=torch.Generator().manual_seed(0))


def average(model, num_samples):
    """Average the gradients over ranks, as DDP does."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def scaled(model, num_samples):
    """Sum the gradients over ranks, as if the loss were multiplied by world_size before DDP's mean."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def check(sync=average):
    """Compare the gradients on two ranks with those of one process on all samples."""
    pairs = [(samples, torch.zeros(3)) for samples in shards(2)]
    check_gradients_equal_single_process(EmbeddingAndLoss, lambda loss, _: loss, pairs, sync, get_world("sim"))


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    samples = shards(int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    model = EmbeddingAndLoss()
    model(samples.flatten(0, 1)).backward()  # one process, all samples; there is no group yet
    alone = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    dist.init_process_group("gloo")
    model.zero_grad()
    replica = DistributedDataParallel(model)  # its hooks end with it
    replica(samples[dist.get_rank()]).backward()
    ratios = {name: (p.grad / alone[name]).median().item() for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        print(*(f"{name} {ratio:.3f}" for name, ratio in ratios.items()), "times the gradient of one process")
    dist.barrier()
    dist.destroy_process_group()
