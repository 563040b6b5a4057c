"""The zoo: real bugs of public projects as small programs, each with its correct twin and the check that finds it."""

from . import (
    accumulation,
    batch_norm,
    clipping,
    data_loading,
    evaluation,
    gradient_buckets,
    messages,
    mismatches,
    model_averaging,
    pipeline_losses,
    pipelines,
    random_numbers,
    ranking,
    resuming,
    scaling,
    tensor_parallel,
    tied_weights,
    token_metrics,
    weighting,
    wrapping,
)
from .entry import ENTRIES, Entry, Judgement, Verdict, judge

__all__ = ["ENTRIES", "TOPICS", "Entry", "Judgement", "Verdict", "judge"]

TOPICS = (
    accumulation,
    batch_norm,
    clipping,
    data_loading,
    evaluation,
    gradient_buckets,
    messages,
    mismatches,
    model_averaging,
    pipeline_losses,
    pipelines,
    random_numbers,
    ranking,
    resuming,
    scaling,
    tensor_parallel,
    tied_weights,
    token_metrics,
    weighting,
    wrapping,
)
