"""The zoo: real bugs of public projects as small programs, each with its correct twin and the check that finds it."""

from . import accumulation, batch_norm, clipping, pipeline_losses, token_metrics, weighting, wrapping
from .entry import ENTRIES, Entry, Judgement, Verdict, judge

__all__ = ["ENTRIES", "TOPICS", "Entry", "Judgement", "Verdict", "judge"]

TOPICS = (accumulation, weighting, pipeline_losses, token_metrics, wrapping, batch_norm, clipping)
