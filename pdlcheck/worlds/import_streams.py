"""The random numbers that modules draw at import: different in each process, and repeatable in a replay.

A new process seeds the streams of ``torch``, ``numpy.random`` and ``random`` from the operating system. So the numbers
that a module draws at import differ between the ranks of a cluster, unless the module has seeded the stream first. Here
each imported file draws from streams seeded with the run's seed, the process and the file name. The numbers differ
between ranks and controller as on a cluster, do not depend on earlier imports, and are the same in a replay.

A stream that the user's code has seeded, in this file or in an earlier one, is left alone.

This module does not import torch.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Protocol

__all__ = [
    "CONTROLLER",
    "ImportStreams",
    "cure_of",
    "drawn_by",
    "first_imports",
    "seeded_so_far",
    "streams_kept",
    "words_of",
]

CONTROLLER = -1  # the process that is not a rank
_STATE_WORDS = 624  # words in a state of the Mersenne twister
_ROUNDS = 400  # a quarter of a million numbers; a file that draws more counts as having seeded the stream
_DRAWN_BY_THE_SYSTEM = 2**40  # torch's own seed is at least that, except once in millions; a user's is smaller
_NUMPY_BEGINS = 623  # the position in a state that the system has seeded; a user's seed sets it to 624

_drawn: dict[str, tuple[str, ...]] = {}
_first_imports: dict[str, list[str]] = {}  # by module: the files that drew, and were the first to import it


def drawn_by(file: str) -> tuple[str, ...]:
    """Return the names of the streams that a file drew from, unseeded, when it was imported in this process."""
    return _drawn.get(file, ())


def first_imports(module: str) -> Sequence[str]:
    """Return the files that drew numbers, unseeded, while they were the first to import this module."""
    return _first_imports.get(module, ())


def words_of(file: str, drawn: Sequence[str]) -> str:
    """Return a sentence about the unseeded draws of ``file``, which it names without its folder."""
    return (
        f"{os.path.basename(file)} draws from {' and '.join(drawn)} when it is imported, or a module that it imports "
        "does, and nothing has seeded it"
    )


def cure_of(drawn: Sequence[str]) -> str:
    """Return the calls that seed the streams ``drawn``."""
    return ", ".join({"torch": "torch.manual_seed(0)"}.get(name, f"{name}.seed(0)") for name in drawn)


class _Stream(Protocol):
    """A random stream of the whole process."""

    name: str

    def state(self) -> Any: ...

    def put(self, state: Any) -> None: ...

    def seed(self, seed: int) -> None: ...

    def has_seeded(self, before: Any, after: Any) -> bool:
        """Return whether the user's code has seeded the stream, rather than drawn from it."""


class _Python:
    name = "random"

    def state(self) -> Any:
        return random.getstate()

    def put(self, state: Any) -> None:
        random.setstate(state)

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def has_seeded(self, before: Any, after: Any) -> bool:
        return not _is_later(before[1], after[1])


class _Numpy:
    name = "numpy.random"

    def __init__(self, numpy_random: Any) -> None:
        self._random = numpy_random

    def state(self) -> Any:
        kind, key, place, *normal = self._random.get_state()
        return kind, (*key.tolist(), place), *normal

    def put(self, state: Any) -> None:
        kind, key, *normal = state
        self._random.set_state((kind, key[:-1], key[-1], *normal))

    def seed(self, seed: int) -> None:
        self._random.seed(seed % 2**32)

    def has_seeded(self, before: Any, after: Any) -> bool:
        return before[0] != after[0] or not _is_later(before[1], after[1])


class _Torch:
    name = "torch"

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._generator = torch.default_generator

    def state(self) -> Any:
        return self._generator.initial_seed(), self._generator.get_state().numpy().tobytes()

    def put(self, state: Any) -> None:
        self._generator.set_state(self._torch.frombuffer(bytearray(state[1]), dtype=self._torch.uint8))

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def has_seeded(self, before: Any, after: Any) -> bool:
        return bool(before[0] != after[0])


class ImportStreams:
    """The streams from which the modules of one process draw while they are imported.

    Args:
        process: a rank, or ``CONTROLLER``.
        seed: the seed of all streams.
        seeded: the names of streams that the user's code has already seeded; they are not touched.
    """

    def __init__(self, process: int, seed: int, seeded: Sequence[str] = ()) -> None:
        self.process, self.seed = process, seed
        self._not_touched = frozenset(seeded)
        self._kept: dict[str, Any] = {}  # the states of streams that the user's code has seeded during an import

    @contextmanager
    def of(self, file: str, *, keeps: bool = False, noted: bool = True) -> Iterator[None]:
        """Make modules draw from the streams of ``file`` while the block runs; afterwards restore the current streams.

        Args:
            file: the imported file; modules that it imports first draw from the same streams.
            keeps: whether a stream that is seeded in the block keeps the state in which the block leaves it.
            noted: whether :func:`drawn_by` returns what the block draws.
        """
        imported = set(sys.modules)
        before = {stream.name: stream.state() for stream in _streams() if stream.name not in self._not_touched}
        began = {}
        for stream in _streams():
            if stream.name in before:
                if stream.name in self._kept:
                    stream.put(self._kept[stream.name])
                else:
                    stream.seed(_seed_of(self.seed, self.process, os.path.basename(file), stream.name))
                began[stream.name] = stream.state()
        try:
            yield
        finally:
            drawn = []
            for stream in _streams():
                if stream.name not in before:
                    continue
                after, is_seeded = stream.state(), stream.name in self._kept
                if not is_seeded and after != began[stream.name]:
                    is_seeded = stream.has_seeded(began[stream.name], after)
                    if not is_seeded:
                        drawn.append(stream.name)
                if is_seeded:
                    self._kept[stream.name] = after
                if not (is_seeded and keeps):
                    stream.put(before[stream.name])
            if noted:
                _drawn[file] = tuple(drawn)
            for name in set(sys.modules) - imported if noted and drawn else ():
                _first_imports.setdefault(name, []).append(file)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Restore all streams after the block."""
    before = [(stream, stream.state()) for stream in _streams()]
    try:
        yield
    finally:
        for stream, state in before:
            stream.put(state)


def seeded_so_far(python: Any, plugin_seed: int | None = None) -> list[str]:
    """Return the names of the streams that the user's code has seeded in this process.

    Args:
        python: the state of ``random`` at the start of the process.
        plugin_seed: the seed with which a plugin has seeded ``random`` and ``numpy.random`` since; None if none has.
    """
    found = []
    begins = [python[1]] if plugin_seed is None else [random.Random(plugin_seed).getstate()[1], python[1]]
    if not any(_is_later(begin, random.getstate()[1]) for begin in begins):
        found.append("random")
    if "numpy.random" in sys.modules and not _is_numpys_own(sys.modules["numpy.random"], plugin_seed):
        found.append("numpy.random")  # a draw without a seed looks the same
    torch = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() < _DRAWN_BY_THE_SYSTEM:
        found.append("torch")
    return found


def _is_numpys_own(numpy_random: Any, plugin_seed: int | None) -> bool:
    """Return whether the stream is as the system or the plugin has seeded it."""
    _, key, place, *_ = numpy_random.get_state()
    if place == _NUMPY_BEGINS or plugin_seed is None:
        return bool(place == _NUMPY_BEGINS)
    _, begin, at, *_ = numpy_random.RandomState(plugin_seed % 2**32).get_state()
    return _is_later((*begin.tolist(), at), (*key.tolist(), place))


def _streams() -> list[_Stream]:
    """Return the streams of the modules that are imported."""
    streams: list[_Stream] = [_Python()]
    if (numpy_random := sys.modules.get("numpy.random")) is not None and hasattr(numpy_random, "get_state"):
        streams.append(_Numpy(numpy_random))
    if hasattr(torch := sys.modules.get("torch"), "default_generator"):
        streams.append(_Torch(torch))
    return streams


def _seed_of(*parts: object) -> int:
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest())


def _is_later(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether drawing numbers leads from one state of the Mersenne twister to the other.

    A state is the words, followed by the position in them.
    """
    if before[:-1] == after[:-1]:
        return after[-1] >= before[-1]
    twister = random.Random()
    twister.setstate((3, before, None))
    for _ in range(_ROUNDS):
        twister.getrandbits(32 * _STATE_WORDS)
        if twister.getstate()[1][:-1] == after[:-1]:
            return True
    return False
