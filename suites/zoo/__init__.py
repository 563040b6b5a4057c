"""The zoo: real bugs of public projects as small programs, each with its correct twin and the check that finds it."""

from . import accumulation
from .entry import ENTRIES, Entry, Judgement, Verdict, judge

__all__ = ["ENTRIES", "TOPICS", "Entry", "Judgement", "Verdict", "judge"]

TOPICS = (accumulation,)
