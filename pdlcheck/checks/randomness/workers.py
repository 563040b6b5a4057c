"""A record of the draws in the workers of a ``DataLoader``, such as random augmentations of samples."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from pdlcheck.checks.checkpoint.object_graph import reached
from pdlcheck.checks.randomness.draws import GLOBAL, Notes

__all__ = ["IN_WORKER", "loaders_of", "workers_noted"]

IN_WORKER = " in worker "  # stands in the place of each draw of a worker

_began: dict[str, str] = {}  # in a worker: the states of its generators when it began


def loaders_of(functions: tuple[Callable[..., object], ...]) -> list[Any]:
    """Return the loaders that functions reach."""
    return list({id(one.held): one.held for one in reached(functions) if isinstance(one.held, DataLoader)}.values())


@contextmanager
def workers_noted(notes: Notes, functions: tuple[Callable[..., object], ...], agreed: Sequence[str]) -> Iterator[None]:
    """Record which generators draw in the workers that loaders start in the block, with their first states.

    A worker has copies of the global generators of torch, NumPy and Python. The loader seeds them, and the program's
    ``worker_init_fn`` may seed them again.

    Args:
        notes: the record to add to.
        functions: functions that reach the loaders.
        agreed: generators with which ranks agree; their draws do not count.
    """
    loaders = [loader for loader in loaders_of(functions) if loader.num_workers]
    if not loaders:
        yield
        return
    before = [(loader.worker_init_fn, loader.collate_fn) for loader in loaders]
    with TemporaryDirectory(prefix="pdlcheck-workers-") as folder:
        for number, loader in enumerate(loaders):
            file = os.path.join(folder, str(number))
            loader.worker_init_fn = _Begin(loader.worker_init_fn)
            loader.collate_fn = _Collate(loader.collate_fn, file)
        try:
            yield
        finally:
            for loader, (begin, collate) in zip(loaders, before, strict=True):
                loader.worker_init_fn, loader.collate_fn = begin, collate
        for number in range(len(loaders)):
            for worker, name, state in _read(Path(folder, str(number))):
                if name not in agreed:
                    notes.add(f"{name} {state}", f"{name}{IN_WORKER}{worker} of a DataLoader")


class _Begin:
    """A ``worker_init_fn`` that records the states of the generators after the program's own."""

    def __init__(self, own: Callable[[int], object] | None) -> None:
        self._own = own

    def __call__(self, worker: int) -> None:
        if self._own is not None:
            self._own(worker)
        _began.clear()
        _began.update(_states())


class _Collate:
    """A ``collate_fn`` that writes the first states of those generators that have drawn."""

    def __init__(self, own: Callable[[Any], Any], file: str) -> None:
        self._own = own
        self._file = file

    def __call__(self, samples: Any) -> Any:
        batch = self._own(samples)
        worker = get_worker_info()
        if worker is not None:
            now = _states()
            for name in [name for name, state in _began.items() if now[name] != state]:
                line = json.dumps([worker.id, name, _began.pop(name)])
                with suppress(FileNotFoundError), open(self._file, "a") as file:  # after the step, it is gone
                    file.write(f"{line}\n")
        return batch


def _states() -> dict[str, str]:
    states = dict(zip(GLOBAL.values(), (random.getstate(), np.random.get_state()), strict=True))
    digests = {name: hashlib.sha256(pickle.dumps(state)).hexdigest() for name, state in states.items()}
    return digests | {"torch's generator": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()}


def _read(file: Path) -> list[tuple[int, str, str]]:
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
