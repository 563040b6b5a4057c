"""Bugs of gradient accumulation: windows of micro-batches that do not add up to the gradient of their samples."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_same_trajectory

from .entry import entry

VOCABULARY, IGNORED = 11, -100


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def texts(step):
    """Return 4 texts of 5 to 2 words with their targets, padded at the end."""
    tokens = torch.randint(0, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(step))
    targets = tokens.roll(-1, dims=1)
    for row in range(4):
        targets[row, 5 - row :] = IGNORED
    return tokens, targets


def own_texts(step):
    """Return the texts of this rank."""
    return [part.chunk(dist.get_world_size())[dist.get_rank()] for part in texts(step)]


def cross_entropy(model, tokens, targets, reduction="mean"):
    logits = model(tokens).flatten(0, 1)
    return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)


@entry(
    "ga-mean-of-means",
    "transformers #34242",
    check="check_same_trajectory",
    cause=r"micro-batches have wrong weights: .* a mean of means, which ignores the numbers of samples or tokens",
)
def averages_the_means_of_microbatches(broken, world):
    """Gradient accumulation averages the mean losses of micro-batches that have different numbers of tokens."""

    def trainer_step(model, optimizer, step, windows=2):
        tokens, targets = texts(step)
        num_items_in_batch = (targets != IGNORED).sum()
        optimizer.zero_grad()
        for part in range(windows):
            micro = tokens[part * 2 : part * 2 + 2], targets[part * 2 : part * 2 + 2]
            if broken:
                loss = cross_entropy(model, *micro) / windows
            else:
                loss = cross_entropy(model, *micro, reduction="sum") / num_items_in_batch
            loss.backward()
        optimizer.step()

    def train(model, steps):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            trainer_step(model, optimizer, step)

    def reference(model, steps):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            optimizer.zero_grad()
            cross_entropy(model, *texts(step)).backward()
            optimizer.step()

    check_same_trajectory(train, reference, LanguageModel, world, world_size=1)


EPOCH = torch.randn(40, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64).split(8)


def error(model, samples):
    return functional.mse_loss(model(samples[:, :3]), samples[:, 3:])


@entry(
    "ga-short-last-window",
    "transformers #38837",
    check="check_same_trajectory",
    cause=r"divides its own loss by 2 once too often: .* or by a number of micro-batches that is not that of this step",
)
def divides_the_short_window_by_the_configured_steps(broken, world):
    """Divide the loss by gradient_accumulation_steps, 2, in the last window of an epoch, which has 1 micro-batch."""
    gradient_accumulation_steps = 2

    def windows(steps):
        """Return the windows of ``steps`` optimizer steps: 2, 2 and 1 micro-batches in each epoch."""
        epoch = [EPOCH[first : first + gradient_accumulation_steps] for first in range(0, len(EPOCH), 2)]
        return [epoch[step % len(epoch)] for step in range(steps)]

    def inner_training_loop(model, steps):
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch_samples in windows(steps):
            optimizer.zero_grad()
            for batch in batch_samples:
                loss = error(model, batch.chunk(dist.get_world_size())[dist.get_rank()])
                (loss / (gradient_accumulation_steps if broken else len(batch_samples))).backward()
            optimizer.step()

    def plainly(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for window in windows(steps):
            optimizer.zero_grad()
            error(model, torch.cat(window)).backward()
            optimizer.step()

    check_same_trajectory(inner_training_loop, plainly, lambda: nn.Linear(3, 1), world)


@entry(
    "ga-num-items-world-factor",
    "transformers #37474",
    check="check_same_trajectory",
    cause=r"each rank divides its own loss by 2 once too often: .* tokens of all ranks",
)
def divides_by_the_tokens_of_all_ranks_and_averages(broken, world):
    """Divide the loss of a rank by the tokens of all ranks, while DDP divides the gradients by world_size, too."""

    def compute_loss(model, tokens, targets):
        num_items_in_batch = (targets != IGNORED).sum()
        dist.all_reduce(num_items_in_batch)
        loss = cross_entropy(model, tokens, targets, reduction="sum") / num_items_in_batch
        return loss if broken else loss * dist.get_world_size()

    def train(model, steps):
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            compute_loss(
                model, *(part.chunk(dist.get_world_size())[dist.get_rank()] for part in texts(step))
            ).backward()
            optimizer.step()

    def plainly(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            cross_entropy(model, *texts(step)).backward()
            optimizer.step()

    check_same_trajectory(train, plainly, LanguageModel, world)
