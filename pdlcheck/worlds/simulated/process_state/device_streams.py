"""The random streams of CUDA devices: a process has one for each device, and so has each rank while it runs.

Nothing is swapped until a device is used. torch then applies the seeds that it was given before. It is not given the
seeds of ranks, because it would store each with a stack trace. This module applies those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdlcheck.compat.torch.cuda import seed_queue
from pdlcheck.worlds.simulated.process_state.protocol import Rank, RunState

__all__ = ["DeviceState", "DeviceStreams", "in_use", "seed_present"]

_BUILT = torch.version.cuda is not None
_queue: Any = seed_queue()
_present: DeviceStreams | None = None  # the streams of the rank that runs, or ran last


class DeviceStreams:
    """The streams of one rank while another one runs.

    Args:
        seed: the seed from which the streams start.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: list[Tensor] = []  # one for each device, once they are in use

    def put(self) -> None:
        """Make the process's streams those of this rank, because it runs now."""
        global _present
        _present = self
        if _BUILT and in_use():
            self.begin()

    def begin(self) -> None:
        """Continue the streams where they stopped, or start them from the seed."""
        if not self._states:
            _seed(self._seed)
        for generator, state in zip(torch.cuda.default_generators, self._states, strict=False):
            generator.set_state(state)

    def take(self) -> None:
        """Save the streams, because the rank gives up its turn or has ended."""
        if in_use():
            self._states = [generator.get_state() for generator in torch.cuda.default_generators]

    def copy(self) -> DeviceStreams:
        """Return other streams that start where these are."""
        other = DeviceStreams(self._seed)
        other._states = self._states
        return other

    def seed(self, seed: int) -> None:
        """Seed the streams, because the rank has called ``torch.manual_seed``."""
        self._seed = seed
        if in_use():
            _seed(seed)


def seed_present(seed: int) -> None:
    """Seed the streams of the rank that runs."""
    if _present is not None:
        _present.seed(seed)


class DeviceState(RunState):
    """The streams of all devices. Runs start from the seed, or where a set-up run has ended."""

    _here: DeviceStreams  # those of the rank that runs

    def capture(self) -> DeviceStreams:
        """Return the streams of the rank, with their present states."""
        here = self._here
        if _BUILT:
            here.take()
        return here

    def apply(self, state: DeviceStreams) -> None:
        """Continue the streams of a rank."""
        self._here = state
        state.put()

    def baseline(self) -> Callable[[], object] | None:
        """Let devices that are first used in the run start from the seed of the rank that runs.

        After the run the controller's streams are where they were. If a device was first used in the run, they start
        from the seeds that the controller has given to torch.
        """
        own = DeviceStreams(torch.initial_seed())
        if in_use():
            own.take()
            return own.begin
        if _BUILT and _queue is not None:
            queued = vars(_queue).copy()
            _queue.queue_seed_all(_begin_present, [])
            return partial(_restore_queue, queued, own)
        return None

    def begin(self, rank: Rank, kept: DeviceStreams | None) -> DeviceStreams | None:
        """Start the streams of a run."""
        self.apply(DeviceStreams(rank.seed) if kept is None else kept.copy())
        return kept

    def end(self, rank: Rank, kept: DeviceStreams | None) -> DeviceStreams | None:
        """Return the streams from which the next run starts; None: from the seed."""
        left = self.capture()
        return left if rank.begins_here else kept


def _restore_queue(queued: dict[str, Any], own: DeviceStreams) -> None:
    vars(_queue).update(queued)
    if in_use():
        own.begin()
        for asked in filter(None, queued["call_order"]):
            asked[0]()


def in_use() -> bool:
    """Return whether this process has used a CUDA device."""
    return _BUILT and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _begin_present() -> None:
    """Start the streams of the rank that runs, because torch has begun to use devices."""
    if _present is not None:
        _present.begin()


def _seed(seed: int) -> None:
    for generator in torch.cuda.default_generators:
        generator.manual_seed(seed)
