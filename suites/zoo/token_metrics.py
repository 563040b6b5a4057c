"""Bugs of reported numbers: a logged loss that is not that of all tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
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
