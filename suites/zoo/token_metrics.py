"""Bugs of reported numbers: a logged loss that is not that of all tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pdlcheck.checks import check_metric

from .entry import entry

IGNORED = -100


@entry(
    "metric-denominator-presharded",
    "torchtitan PR #3111",
    check="check_metric",
    cause="2 times too small: divided twice, or each rank counts all samples",
)
def counts_tokens_before_the_sequence_is_divided(broken, world):
    """Count the tokens of the whole sequence on each context-parallel rank, for the losses of a part of it."""

    def context_parallel_shard(*tensors):
        return [part.tensor_split(dist.get_world_size())[dist.get_rank()] for part in tensors]

    def log_metrics(logits, labels):
        if broken:
            local_valid_tokens = (labels != IGNORED).sum()
        logits, labels = context_parallel_shard(logits, labels)
        if not broken:
            local_valid_tokens = (labels != IGNORED).sum()
        loss_sum = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        totals = torch.stack([loss_sum, local_valid_tokens.to(loss_sum.dtype)])
        dist.all_reduce(totals)
        return float(totals[0] / totals[1])

    generator = torch.Generator().manual_seed(8)
    labels = torch.randint(0, 5, (12,), generator=generator)
    labels[4:6] = IGNORED
    check_metric(log_metrics, [torch.randn(12, 5, generator=generator), labels], world)


@entry(
    "eval-loss-over-own-labels",
    "ms-swift PR #9152, transformers PR #48167",
    check="check_metric",
    judged="none",
    why="a note says that ranks report unlike numbers; no candidate divides a sum of all ranks by a count of one",
)
def divides_gathered_losses_by_the_own_labels(broken, world):
    """Gather the losses of all parts of a sequence, and divide their sum by the labels of the own part."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))

    def gather(losses):
        parts = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, losses)
        return torch.cat(parts)

    @torch.no_grad()
    def evaluation_loop(sequences, labels):
        losses = []
        for sequence, wanted in zip(sequences, labels, strict=True):
            own, own_wanted = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in (sequence, wanted))
            of_tokens = functional.cross_entropy(model(own), own_wanted, ignore_index=IGNORED, reduction="none")
            count = ((own_wanted if broken else wanted) != IGNORED).sum()
            losses.append(float(gather(of_tokens).sum() / count))
        return sum(losses) / len(losses)

    generator = torch.Generator().manual_seed(5)
    sequences = torch.randint(0, 5, (4, 12), generator=generator)
    labels = sequences.roll(-1, 1).masked_fill(torch.rand(4, 12, generator=generator) < 0.3, IGNORED)
    check_metric(evaluation_loop, [sequences, labels], world)
