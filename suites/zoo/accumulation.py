"""Bugs of gradient accumulation: windows of micro-batches that do not add up to the gradient of their samples."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

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


def cross_entropy(model, tokens, targets, reduction="mean"):
    logits = model(tokens).flatten(0, 1)
    return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)


@entry(
    "ga-mean-of-means",
    "transformers #34242",
    check="check_same_trajectory",
    judged="none",
    why="the weights of one step do not show how the losses of its micro-batches were added",
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
