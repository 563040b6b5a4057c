"""The callback of Lightning's Trainer that watches a training. Import it where Lightning is installed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pdlcheck.watching.watcher import Watcher, watch

try:
    from lightning.pytorch import Callback
except ImportError:  # Lightning has two packages
    from pytorch_lightning import Callback

__all__ = ["WatchCallback"]


class WatchCallback(Callback):
    """A watcher of the Trainer's model and optimizers, from the start of ``fit`` to its end.

    A run of one process is not watched.

    Args:
        **options: those of :func:`pdlcheck.watch`. ``scaler`` is the Trainer's own if it has one.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.watcher: Watcher | None = None
        self._options = options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        if dist.is_initialized():
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self.watcher = watch(pl_module, trainer.optimizers, **{"scaler": scaler, **self._options})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop to watch."""
        if self.watcher is not None:
            self.watcher.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop to watch."""
        self.on_train_end(trainer, pl_module)
