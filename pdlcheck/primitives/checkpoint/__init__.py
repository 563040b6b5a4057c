"""Checkpoints for a bit-for-bit resume; a file that differs from the written one is refused."""

from pdlcheck.primitives.checkpoint.load import latest_checkpoint, load_checkpoint
from pdlcheck.primitives.checkpoint.save import save_checkpoint
from pdlcheck.primitives.checkpoint.steps import resumable_steps

__all__ = ["latest_checkpoint", "load_checkpoint", "resumable_steps", "save_checkpoint"]
