"""The data that a rank reads in a training: the batches that its DataLoaders return, and the inputs of its model."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from pdlcheck.checks.rank_results import bits
from pdlcheck.compat.torch.loaders import NEXT_SAMPLES, Pass, seed_of_workers

__all__ = ["Batch", "PassOfLoader", "Reading", "record_batches"]

_DEPTH = 4  # of containers and objects in a batch
_MOST_SAMPLERS = 8
_PASS = "_pdlcheck_pass"  # an attribute of iterators, which any thread may ask for a batch


@dataclass(frozen=True)
class PassOfLoader:
    """A pass over a DataLoader, as it began.

    Args:
        number: the count of passes that began before, of all loaders of the rank.
        epoch: the epoch that the sampler has; None if it has none.
        order: the state of the generator that shuffles; None if no generator does.
        seed: the seed from which the workers draw; None without workers.
    """

    number: int
    epoch: int | None
    order: str | None
    seed: int | None


@dataclass(frozen=True)
class Batch:
    """A batch that a DataLoader returned.

    Args:
        step: the training step that asked for it, from 1; 0 before the first.
        of: the pass.
        place: the count of batches before it in its pass.
        content: a digest of everything in it.
        tensors: a digest of each tensor in it.
        samples: the indices of its samples, as text; None if unknown, or if the samples have none.
    """

    step: int
    of: PassOfLoader
    place: int
    content: str
    tensors: frozenset[str]
    samples: str | None


@dataclass
class Reading:
    """The data that one rank has read.

    Args:
        batches: in the order in which the loaders returned them.
        inputs: for each step, the tensors of each call of the model, as digests.
        step: the present step.
    """

    batches: list[Batch] = field(default_factory=list)
    inputs: dict[int, list[tuple[str, ...]]] = field(default_factory=dict)
    step: int = 0


class Recorder:
    """A record of this rank's data. The model becomes known only after the recording has begun."""

    def __init__(self) -> None:
        """Begin with an empty record."""
        self.reading = Reading()
        self._passes = 0
        self._hooks: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Record the inputs of ``model`` from now on."""
        with suppress(Exception):  # a scripted module may refuse hooks
            self._hooks.append(model.register_forward_pre_hook(self._call, with_kwargs=True))

    def begin(self, batches: Any, epoch: int | None, order: str | None, samples: Sequence[str | None]) -> None:
        """Record the start of a pass."""
        of = PassOfLoader(self._passes, epoch, order, seed_of_workers(batches))
        setattr(batches, _PASS, _Open(self.reading, of, deque(samples)))
        self._passes += 1

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        digests = [digest for is_tensor, digest in _leaves((args, kwargs)) if is_tensor]
        self.reading.inputs.setdefault(self.reading.step, []).append(tuple(digests))


@dataclass
class _Open:
    """A pass that goes on: the samples of its next batches, which workers load ahead, and the place of the next one."""

    reading: Reading
    of: PassOfLoader
    samples: deque[str | None]
    place: int = 0

    def add(self, data: Any) -> None:
        leaves = list(_leaves(data))
        tensors = frozenset(digest for is_tensor, digest in leaves if is_tensor)
        content = _hashed("\n".join(digest for _, digest in leaves).encode())
        samples = self.samples.popleft() if self.samples else None
        self.reading.batches.append(Batch(self.reading.step, self.of, self.place, content, tensors, samples))
        self.place += 1


class _OfThread(threading.local):
    """The recorder of a rank, because simulated ranks are threads, and the samples of a pass that is just beginning."""

    recorder: Recorder | None = None
    beginning: list[str | None] | None = None


_here = _OfThread()
_lock = threading.Lock()
_users = 0
_originals: dict[tuple[Any, str], Any] = {}


@contextmanager
def record_batches() -> Iterator[Recorder]:
    """Record the batches that DataLoaders return on this rank during the block."""
    recorder = Recorder()
    _patch()
    _here.recorder = recorder
    try:
        yield recorder
    finally:
        _here.recorder = None
        recorder.end()
        _restore()


def _patch() -> None:
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        patches = [(DataLoader, "__iter__", _begin), (Pass, "__next__", _next)]
        if NEXT_SAMPLES.is_there():
            patches.append((Pass, NEXT_SAMPLES.attribute, _next_samples))
        for owner, attribute, around in patches:
            real = _originals[owner, attribute] = getattr(owner, attribute)
            setattr(owner, attribute, functools.wraps(real)(around(real)))


def _restore() -> None:
    global _users
    with _lock:
        _users -= 1
        while _originals and not _users:
            (owner, attribute), real = _originals.popitem()
            setattr(owner, attribute, real)


def _begin(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def begin(loader: Any) -> Any:
        recorder = _here.recorder
        if recorder is None:
            return real(loader)
        epoch = order = None
        with suppress(Exception):  # attributes of the program's own samplers may raise
            epoch, order = _epoch_of(loader), _order_of(loader)  # now, because a sampler may count its passes
        samples: list[str | None] = []
        _here.beginning = samples
        try:
            batches = real(loader)
        finally:
            _here.beginning = None
        if isinstance(batches, Pass):
            recorder.begin(batches, epoch, order, samples)
        return batches

    return begin


def _next(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get(batches: Any) -> Any:
        data = real(batches)
        opened: _Open | None = getattr(batches, _PASS, None)
        if opened is not None:
            opened.add(data)
        return data

    return get


def _next_samples(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get(batches: Any) -> Any:
        found = real(batches)
        opened: _Open | None = getattr(batches, _PASS, None)
        each = found if isinstance(found, list | tuple) else [found]
        samples = None if all(one is None for one in each) else _hashed(repr(found).encode())
        if _here.beginning is not None:
            _here.beginning.append(samples)
        elif opened is not None:
            opened.samples.append(samples)
        return found

    return get


def _samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader, the outermost first."""
    found = [loader.sampler if loader.batch_sampler is None else loader.batch_sampler]
    for one in found:
        inner = (getattr(one, name, None) for name in ("batch_sampler", "sampler"))
        found += [held for held in inner if held is not None][: _MOST_SAMPLERS - len(found)]
    return found


def _epoch_of(loader: Any) -> int | None:
    streams = [loader.dataset] if isinstance(loader.dataset, IterableDataset) else []
    epochs = [getattr(one, "epoch", None) for one in [*_samplers_of(loader), *streams]]
    return next((epoch for epoch in epochs if type(epoch) is int), None)


def _order_of(loader: Any) -> str | None:
    """Return the state of the generator that shuffles, which is that of torch if the sampler has none of its own."""
    for sampler in _samplers_of(loader):
        if hasattr(sampler, "generator"):
            own = sampler.generator
            state = own.get_state() if isinstance(own, torch.Generator) else torch.get_rng_state()
            return _hashed(state.numpy().tobytes())
    return None


def _leaves(data: Any, depth: int = 0) -> Iterator[tuple[bool, str]]:
    """Yield a digest of each tensor or other value in ``data``, and whether it is a tensor."""
    if isinstance(data, Tensor | np.ndarray):
        yield True, _digest(data)
    elif data is None or isinstance(data, bool | int | float | complex | str | bytes):
        yield False, repr(data)
    elif isinstance(data, Mapping) and depth < _DEPTH:
        for key, value in data.items():
            yield False, f"{key!r}:"
            yield from _leaves(value, depth + 1)
    elif isinstance(data, list | tuple) and depth < _DEPTH:
        for value in data:
            yield from _leaves(value, depth + 1)
    else:
        yield False, type(data).__name__
        if depth < _DEPTH and hasattr(data, "__dict__") and not isinstance(data, nn.Module):
            yield from _leaves(vars(data), depth + 1)


def _digest(data: Any) -> str:
    try:
        if isinstance(data, Tensor):
            held: Any = data.detach()
            held = held.to_local() if hasattr(held, "to_local") else held
            held = (held if held.layout == torch.strided else held.to_dense()).cpu()
            return f"{held.dtype} {tuple(held.shape)} {_hashed(bits(held.reshape(-1)).numpy().tobytes())}"
        return f"{data.dtype} {data.shape} {_hashed(data.tobytes() if data.dtype != object else repr(data).encode())}"
    except Exception:  # a tensor of an unusual kind, which has no bytes
        return f"{type(data).__name__} {data.dtype} {tuple(data.shape)}"


def _hashed(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
