"""The events of a training that make a wrong checkpoint show: ends of epochs, and changes of the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pdlcheck.checks.checkpoint.object_graph import reached

__all__ = ["Events", "watching_events"]


class Events:
    """The events of one rank's run, before and after its checkpoint."""

    def __init__(self, functions: tuple[Callable[..., object], ...]) -> None:
        held = {id(one.held): one.held for one in reached(functions)}
        # Not isinstance: accelerate's adapters report the class of the loader that they hold, and refuse another.
        self.loaders: list[Any] = [one for one in held.values() if issubclass(type(one), DataLoader)]
        self._schedules = any(isinstance(one, LRScheduler) for one in held.values())
        self._optimizers = [one for one in held.values() if isinstance(one, Optimizer)]
        self._passes: list[int] = [0]
        self._rates = [self._learning_rates()]

    def begin_pass(self) -> None:
        """Count a pass over a loader."""
        self._passes[-1] += 1

    def end_part(self) -> None:
        """Record that the steps before the checkpoint, or those after it, have ended."""
        self._passes.append(0)
        self._rates.append(self._learning_rates())

    def conditions(self) -> dict[str, bool]:
        """Return the conditions that this training can meet, and whether it has met them.

        A training without a loader has no end of an epoch that the check could see.
        """
        before, after = self._passes[:2]
        met = {}
        if self.loaders:
            # A loader's first pass is no end of an epoch.
            met["an epoch end before the save"] = before > len(self.loaders)
            met["an epoch end after the save"] = after > 0 and before > 0
        if self._schedules and self._optimizers:
            start, saved, end = self._rates[:3]
            met["a change of the learning rate before the save"] = start != saved
            met["a change of the learning rate after the save"] = saved != end
        return met

    def _learning_rates(self) -> list[Any]:
        return [float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]


@contextmanager
def watching_events(functions: tuple[Callable[..., object], ...]) -> Iterator[Events]:
    """Count the passes that the loaders of a training begin in the block."""
    events = Events(functions)
    kinds = [type(loader) for loader in events.loaders]
    for loader, kind in zip(events.loaders, kinds, strict=True):
        loader.__class__ = _counting(kind, events)
    try:
        yield events
    finally:
        _restore(events.loaders, kinds)


def _counting(kind: type, events: Events) -> type:
    def begin(self: Any) -> Any:
        events.begin_pass()
        return kind.__iter__(self)  # type: ignore[attr-defined]  # of a DataLoader

    return type(kind.__name__, (kind,), {"__iter__": begin, "__module__": kind.__module__})


def _restore(loaders: Sequence[Any], kinds: Sequence[type]) -> None:
    for loader, kind in zip(loaders, kinds, strict=True):
        loader.__class__ = kind
