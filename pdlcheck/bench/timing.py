"""The timing of functions on one rank, in step with the other ranks of the default process group.

Functions that are compared take turns within each round, so that a busy moment of the machine affects all of them.
All ranks agree on every number of repetitions before they use it: a rank that decided by its own clock would leave the
others in a collective.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pdlcheck.bench.cpu_load import CpuLoad
from pdlcheck.bench.peak_memory import peak_memory
from pdlcheck.bench.records import RankRecord, RankTimes

__all__ = ["Rounds", "time_in_turns"]

_SAMPLE_S = 1e-3  # a shorter call is repeated within one sample, because a barrier releases ranks up to 0.1 ms apart
_MOST_ITERATIONS = 1000
_FASTER = 0.95  # the warm-up continues while the last rounds are faster than the rounds before by this factor
_LAST = 3  # the number of these last rounds


@dataclass(frozen=True)
class Rounds:
    """The limits of a measurement.

    Args:
        max_time_s: seconds for each function; also the limit of its warm-up.
        min_rounds: the least number of rounds, however long they take.
        max_rounds: the largest number of rounds.
        iterations: calls in one sample; ``None`` means as many as fill a millisecond.
    """

    max_time_s: float = 1.0
    min_rounds: int = 5
    max_rounds: int = 300
    iterations: int | None = None

    def __post_init__(self) -> None:
        if not self.max_time_s > 0:
            raise ValueError(f"max_time_s must be positive, got {self.max_time_s}")
        if not 1 <= self.min_rounds <= self.max_rounds:
            raise ValueError(f"min_rounds must be from 1 to max_rounds={self.max_rounds}, got {self.min_rounds}")
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}; pass None to choose it by time")


def time_in_turns(
    ways: Mapping[str, Callable[[], Any]],
    rounds: Rounds,
    *,
    setup: Callable[[], object] | None = None,
    check: Callable[[Any], int | None] | None = None,
    device: torch.device | None = None,
) -> tuple[dict[str, Any], RankRecord, dict[str, int]]:
    """Time each of ``ways`` on this rank; every rank of the default group calls this with the same names.

    Args:
        ways: the functions by name, in the order of the rows.
        rounds: the limits of the measurement.
        setup: called before each sample and before the last call of each way; not timed.
        check: called with the result of the last call of each way, before the next way runs, which may write the same
            tensor. It raises, or returns the number of wrong elements.
        device: the device on which the functions compute; a CUDA device is synchronised before each reading of the
            clock.

    Returns:
        The result of one more, untimed call of each way, the times, and the number of wrong elements of each way.
    """
    device = device or torch.device("cpu")
    prepare = setup or (lambda: None)
    iterations = {name: _iterations(way, rounds, prepare, device) for name, way in ways.items()}
    sample = {name: _sampler(way, iterations[name], prepare, device) for name, way in ways.items()}
    warm_ups, round_s = _warm_up(sample, rounds, device)
    number = min(max(int(rounds.max_time_s * len(ways) / max(round_s, 1e-9)), rounds.min_rounds), rounds.max_rounds)
    taken: dict[str, list[tuple[float, float | None]]] = {name: [] for name in ways}
    names = list(ways)
    with CpuLoad() as load:
        for turn in range(number):
            for name in names if turn % 2 == 0 else reversed(names):
                taken[name].append(sample[name]())
    results, times, wrong = {}, [], {}
    for name, way in ways.items():
        prepare()
        with peak_memory(device) as peak:
            results[name] = way()
            _synchronise(device)
        if check is not None:
            wrong[name] = int(check(results[name]) or 0)
        on_device = [seconds for _, seconds in taken[name] if seconds is not None]
        times.append(
            RankTimes(
                name,
                iterations[name],
                [seconds for seconds, _ in taken[name]],
                on_device or None,
                peak.host_bytes,
                peak.device_bytes,
            )
        )
    return results, RankRecord(tuple(times), warm_ups, torch.get_num_threads(), str(device), load.reading), wrong


def _iterations(way: Callable[[], Any], rounds: Rounds, prepare: Callable[[], object], device: torch.device) -> int:
    if rounds.iterations is not None:
        return rounds.iterations
    once = _sampler(way, 1, prepare, device)
    once()  # the first call loads libraries and kernels
    (seconds,) = _slowest([once()[0]], device)
    return min(max(round(_SAMPLE_S / max(seconds, 1e-9)), 1), _MOST_ITERATIONS)


def _sampler(
    way: Callable[[], Any], iterations: int, prepare: Callable[[], object], device: torch.device
) -> Callable[[], tuple[float, float | None]]:
    """Return a function that takes one sample: seconds of a call by the clock, and by the events of a CUDA device."""

    def sample() -> tuple[float, float | None]:
        prepare()
        _meet(device)
        with _events(device) as elapsed:
            start = time.perf_counter()
            for _ in range(iterations):
                way()
            if elapsed:
                elapsed[0].record()
            _synchronise(device)
            seconds = (time.perf_counter() - start) / iterations
        return seconds, elapsed[1]() / iterations if elapsed else None

    return sample


def _warm_up(
    sample: Mapping[str, Callable[[], tuple[float, float | None]]], rounds: Rounds, device: torch.device
) -> tuple[int, float]:
    """Run rounds until they no longer get faster; return their number and a round's seconds, the same on all ranks."""
    lasted: list[float] = []
    start = time.perf_counter()
    while True:
        began = time.perf_counter()
        for one in sample.values():
            one()
        lasted.append(time.perf_counter() - began)
        gets_faster = len(lasted) <= _LAST or min(lasted[-_LAST:]) < _FASTER * min(lasted[:-_LAST])
        elapsed, goes_on, typical = _slowest(
            [time.perf_counter() - start, float(gets_faster), statistics.median(lasted[-_LAST:])], device
        )
        if not goes_on or elapsed > rounds.max_time_s * len(sample):
            return len(lasted), typical


@contextmanager
def _events(device: torch.device) -> Iterator[tuple[Any, Callable[[], float]] | None]:
    """Yield the end event of a CUDA device and a function that returns the seconds until it; None on other devices."""
    if device.type != "cuda":
        yield None
        return
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    yield end, lambda: begin.elapsed_time(end) / 1e3


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _meet(device: torch.device) -> None:
    """Wait for all ranks; afterwards the device is idle."""
    _synchronise(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
        _synchronise(device)


def _slowest(values: list[float], device: torch.device) -> list[float]:
    """Return the largest value over ranks, for each value."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    on = device if dist.get_backend() == "nccl" else torch.device("cpu")
    largest = torch.tensor(values, dtype=torch.float64, device=on)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()
