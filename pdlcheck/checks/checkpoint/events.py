"""The events of a training that make a wrong checkpoint show: ends of epochs, and changes of the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pdlcheck.checks.checkpoint.object_graph import reached

__all__ = ["Course", "Events", "further_stops", "watching_events"]


@dataclass(frozen=True)
class Course:
    """The steps of one rank's run without a stop.

    Args:
        passes: for each step, the number of passes over loaders that begin in it.
        rates: the learning rates, at the start and after each step; None without a schedule.
        loaders: the number of loaders.
        digests: of the model's tensors, at the start and after each step; empty if they were not asked for.
    """

    passes: Sequence[int]
    rates: Sequence[Any] | None
    loaders: int
    digests: Sequence[Mapping[str, str]] = ()

    def conditions(self, saved_after: int) -> dict[str, bool]:
        """Return the conditions that this training can meet, and whether it meets them if it saves after a step.

        A training without a loader has no end of an epoch that the check could see.
        """
        before, after = sum(self.passes[:saved_after]), sum(self.passes[saved_after:])
        met = {}
        if self.loaders:
            # A loader's first pass is no end of an epoch.
            met["an epoch end before the save"] = before > self.loaders
            met["an epoch end after the save"] = after > 0 and before > 0
        if self.rates is not None:
            start, saved, end = self.rates[0], self.rates[saved_after], self.rates[-1]
            met["a change of the learning rate before the save"] = start != saved
            met["a change of the learning rate after the save"] = saved != end
        return met


def further_stops(courses: Sequence[Course], stop: int) -> list[int]:
    """Return further steps after which a training can be stopped, if it resumes right after the step ``stop``.

    These are a step within the second epoch, the end of the first, and the first step. A training may save only in some
    places: at the end of an epoch, where its weights are updated, or where its ranks have the same weights. So each
    place is of the kind of ``stop``. A training without a loader has no epoch that the check could see.
    """
    steps = range(1, len(courses[0].passes))
    if not all(course.loaders and course.digests for course in courses):
        return []
    ends = [step for step in steps if all(course.passes[step] for course in courses)]  # the next step begins a pass
    wanted = [*((ends[0] + 1, ends[0]) if ends else ()), 1]
    return [
        step
        for step in dict.fromkeys(wanted)
        if step in steps
        and step != stop
        and (stop not in ends or step in ends)
        and all(course.digests[step - 1] != course.digests[step] != course.digests[-1] for course in courses)
        and (_agree(courses, step) or not _agree(courses, stop))
    ]


def _agree(courses: Sequence[Course], step: int) -> bool:
    return all(course.digests[step] == courses[0].digests[step] for course in courses)


class Events:
    """The events of one rank's run."""

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

    def end_step(self) -> None:
        """Record that a step has ended."""
        self._passes.append(0)
        self._rates.append(self._learning_rates())

    def course(self, digests: Sequence[Mapping[str, str]] = ()) -> Course:
        """Return the steps that have ended."""
        rates = self._rates if self._schedules and self._optimizers else None
        return Course(self._passes[:-1], rates, len(self.loaders), digests)

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
