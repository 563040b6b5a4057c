"""A comparison of the ranks' states during a training in production."""

from pdlcheck.watching.watcher import Watcher, watch

__all__ = ["Watcher", "watch"]
