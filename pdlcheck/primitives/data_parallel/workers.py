"""Concurrent calls, each in its own thread, with the settings of the calling thread."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["RNG", "run_workers"]

RNG = ("device", "distinct", "same")


def run_workers(
    calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device], *, rng: str = "device"
) -> list[Any]:
    """Run ``calls[i]`` for ``devices[i]`` and return the results in order, when all have ended.

    The first call runs in the calling thread, and each other call in a thread of its own. The new threads copy these
    settings of the calling thread: grad mode, inference mode, autocast, default device, current CUDA streams and
    context variables. If the default device is the first worker's device, it becomes the worker's own. Dispatch modes,
    function modes and saved-tensor hooks are not copied, because torch does not expose them.

    Args:
        calls: one for each worker.
        devices: the devices of the workers.
        rng: ``"device"``: workers draw from the generator of their device. CPU workers share one, so timing decides
            which numbers each gets. ``"same"``: every worker starts from the state of the first device's generator and
            draws the same numbers. ``"distinct"``: every worker gets a seed of its own, drawn from that generator. With
            the last two, workers on one device take turns, and a run repeats bit for bit.

    Raises:
        BaseException: the exception of the first failed worker (by number), with a note that names it, and one note for
            each other failed worker.
    """
    if len(calls) == 1:
        return [calls[0]()]
    results: list[Any] = [None] * len(calls)
    failures: dict[int, BaseException] = {}
    settings = _Settings(devices[0])
    states = _streams(devices, rng)
    locks = {device: threading.Lock() for device in devices}

    def work(worker: int) -> None:
        try:
            with _drawing_from(devices[worker], states[worker], locks[devices[worker]]):
                results[worker] = calls[worker]()
        except BaseException as error:
            failures[worker] = error

    def in_thread(worker: int) -> None:
        try:
            with settings.entered(devices[worker]):
                work(worker)
        except BaseException as error:  # a setting could not be entered
            failures.setdefault(worker, error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(in_thread, worker), name=f"worker {worker}")
        for worker in range(1, len(calls))
    ]
    for thread in threads:
        thread.start()
    try:
        work(0)
    finally:
        for thread in threads:
            thread.join()
    if failures:
        _raise(failures, devices[: len(calls)])
    if rng == "same" and states[0] is not None:
        states[0].leave()
    return results


def _raise(failures: dict[int, BaseException], devices: Sequence[torch.device]) -> None:
    names = {worker: f"worker {worker} of {len(devices)} ({devices[worker]})" for worker in failures}
    first, *others = sorted(failures)
    error = failures[first]
    error.add_note(f"in {names[first]}")
    for worker in others:
        error.add_note(f"{names[worker]} failed too: {type(failures[worker]).__name__}: {failures[worker]}")
    raise error


class _Settings:
    """The settings of the calling thread, read in that thread."""

    def __init__(self, home: torch.device) -> None:
        self.home = home
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.default_device = torch.get_default_device()
        self.cache = torch.is_autocast_cache_enabled()
        self.autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in sorted({"cpu", home.type})
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        }
        self.streams: dict[int | None, Any] = {}
        if home.type == "cuda":
            self.streams = {index: torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())}

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.cache))
            if self.default_device != torch.device("cpu"):
                same = self.default_device == self.home
                stack.enter_context(device if same else self.default_device)
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                if device.index in self.streams:
                    stack.enter_context(torch.cuda.stream(self.streams[device.index]))
                torch.cuda.current_stream(device).query()  # creates the thread's context: cuBLAS warns without
            yield


class _Stream:
    """The random numbers of one worker: the state of its device's generator at the start, and after its draws."""

    def __init__(self, device: torch.device, start: torch.Tensor | int) -> None:
        self.device = device
        self.start = start
        self.end: torch.Tensor | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        before = _state(self.device)
        if isinstance(self.start, int):
            _generator(self.device).manual_seed(self.start)
        else:
            _generator(self.device).set_state(self.start)
        try:
            yield
        finally:
            self.end = _state(self.device)
            _generator(self.device).set_state(before)

    def leave(self) -> None:
        """Set the device's generator to the state after this worker's draws. Call it after all workers have ended."""
        if self.end is not None:
            _generator(self.device).set_state(self.end)


@contextmanager
def _drawing_from(device: torch.device, stream: _Stream | None, lock: threading.Lock) -> Iterator[None]:
    if stream is None:
        yield
        return
    with lock, stream.entered():
        yield


def _streams(devices: Sequence[torch.device], rng: str) -> list[_Stream | None]:
    if rng == "device":
        return [None] * len(devices)
    if rng == "same":
        start = _state(devices[0])
        return [_Stream(device, start) for device in devices]
    generator = _generator(devices[0])
    drawn = torch.randint(2**62, (len(devices),), generator=generator, device=devices[0]).tolist()
    own: list[_Stream | None] = [_Stream(device, seed) for device, seed in zip(devices, drawn, strict=True)]
    return own


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


def _state(device: torch.device) -> torch.Tensor:
    return _generator(device).get_state()
