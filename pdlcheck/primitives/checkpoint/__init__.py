"""Checkpoints from which training goes on bit for bit, and that are refused where they are not what was written."""

from pdlcheck.primitives.checkpoint.load import latest_checkpoint, load_checkpoint
from pdlcheck.primitives.checkpoint.save import save_checkpoint
from pdlcheck.primitives.checkpoint.steps import resumable_steps

__all__ = ["latest_checkpoint", "load_checkpoint", "resumable_steps", "save_checkpoint"]
