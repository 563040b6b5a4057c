"""The callback of ``transformers.Trainer`` that watches a training. Import it where transformers is installed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from pdlcheck.watching.watcher import Watcher, watch

__all__ = ["WatchCallback"]


class WatchCallback(TrainerCallback):
    """A watcher of the Trainer's model and optimizer, from the start of ``train`` to its end.

    A run of one process is not watched.

    Args:
        **options: those of :func:`pdlcheck.watch`.
    """

    def __init__(self, **options: Any) -> None:
        self.watcher: Watcher | None = None
        self._options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin to watch."""
        if dist.is_initialized():
            self.watcher = watch(objects["model"], objects["optimizer"], **self._options)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Stop to watch."""
        if self.watcher is not None:
            self.watcher.close()
