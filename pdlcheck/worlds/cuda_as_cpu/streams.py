"""Streams and events of a device whose work is complete when the call that starts it returns."""

from __future__ import annotations

import time
from typing import Any

import torch

from pdlcheck.worlds.rank_devices import require_devices

__all__ = ["Event", "Stream", "current_stream", "default_stream", "set_stream", "stream"]

_MS = 1000.0


class Event:
    """A moment of this rank: the clock at the call of :meth:`record`, because all earlier work is complete by then."""

    def __init__(self, enable_timing: bool = False, *args: Any, **options: Any) -> None:
        self._enable_timing = enable_timing
        self._recorded: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the time."""
        self._recorded = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: all work is complete."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds of the CPU's clock from this event to ``end_event``.

        Raises:
            ValueError: an event was not made with ``enable_timing=True``, or not recorded.
        """
        if not (self._enable_timing and end_event._enable_timing):
            raise ValueError("elapsed_time needs two events that were made with enable_timing=True")
        if self._recorded is None or end_event._recorded is None:
            raise ValueError("elapsed_time needs two events that were recorded; call record() first")
        return (end_event._recorded - self._recorded) * _MS


class Stream:
    """A queue of work that is always empty."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device_index = require_devices().index(device)
        self.device = torch.device("cuda", self.device_index)
        self.priority = priority
        self.stream_id = self.cuda_stream = 0 if options.get("is_default") else id(self)
        self._entered: list[Any] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))

    def __enter__(self) -> Stream:
        block = stream(self)
        block.__enter__()
        self._entered.append(block)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)

    def wait_event(self, event: Event) -> None:
        """Return at once."""

    def wait_stream(self, stream: Stream) -> None:
        """Return at once."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Return True: all work is complete."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


def default_stream(device: Any = None) -> Stream:
    """Return the stream of a device for work that names no other stream."""
    return Stream(device, is_default=True)


def current_stream(device: Any = None) -> Stream:
    """Return the stream for this rank's work on a device."""
    devices = require_devices()
    index = devices.index(device)
    known: Stream | None = devices.streams.get(index)
    return default_stream(index) if known is None else known


def set_stream(stream: Stream | None) -> None:
    """Make ``stream`` the current stream of this rank."""
    if stream is not None:
        devices = require_devices()
        devices.streams[stream.device_index] = stream
        devices.current = stream.device_index


class stream:
    """The block ``with torch.cuda.stream(...)``, which can be entered again; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: list[tuple[dict[int, Stream], int]] = []

    def __enter__(self) -> None:
        devices = require_devices()
        self._before.append((dict(devices.streams), devices.current))
        set_stream(self.stream)

    def __exit__(self, *raised: object) -> None:
        devices = require_devices()
        devices.streams, devices.current = self._before.pop()
