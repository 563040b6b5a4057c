"""pylate 1.6.0: Contrastive(gather_across_devices=True) has gradients that are world_size times too large.

torchrun --nproc-per-node 2 pylate_gradient.py    # plain gloo, under DDP
python pylate_gradient.py                         # check_gradients_equal_single_process: fails
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from pylate import losses
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_gradients_equal_single_process
from pdlcheck.worlds import get_world


class Tokens(nn.Module):
    """The part of a ColBERT model that the loss uses: embeddings of tokens."""

    skiplist, do_query_expansion = (), True

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, features):
        return {"token_embeddings": self.layer(features["inputs"])}


class EmbeddingAndLoss(nn.Module):
    """Returns the loss of pairs of a query and a document of two tokens each, so that DDP averages its gradients."""

    def __init__(self):
        super().__init__()
        self.tokens = Tokens()

    def forward(self, pairs):
        ids = torch.ones(len(pairs), 2, dtype=torch.long)
        features = [{"inputs": side, "input_ids": ids, "attention_mask": ids.bool()} for side in pairs.unbind(1)]
        return losses.Contrastive(self.tokens, gather_across_devices=dist.is_initialized())(features)


def shards(world_size):
    return torch.randn(world_size, 3, 2, 2, 5, generator=torch.Generator().manual_seed(0))


def average(model, num_samples):
    """Average the gradients over ranks, as DDP does."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def check():
    """Compare the gradients on two ranks with those of one process on all samples."""
    pairs = [(samples, torch.zeros(3)) for samples in shards(2)]
    check_gradients_equal_single_process(EmbeddingAndLoss, lambda loss, _: loss, pairs, average, get_world("sim"))


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    samples = shards(int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    model = EmbeddingAndLoss()
    loss = model(samples.flatten(0, 1))  # one process, all samples; there is no group yet
    loss.backward()
    alone = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    dist.init_process_group("gloo")
    model.zero_grad()
    replica = DistributedDataParallel(model)  # its hooks end with it
    found = replica(samples[dist.get_rank()])
    found.backward()
    ratios = {name: (p.grad / alone[name]).median().item() for name, p in model.named_parameters()}
    dist.all_reduce(found.data)
    if dist.get_rank() == 0:
        print(*(f"{name} {ratio:.3f}" for name, ratio in ratios.items()), end=" times the gradient of one process, ")
        print(f"mean loss {found.item() / dist.get_world_size() / loss.item():.3f} times its loss", flush=True)
    dist.barrier()
    dist.destroy_process_group()
