"""The position of a thread in terms of the user's code: the communication call, the file and the line."""

from __future__ import annotations

import gc
import operator
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, repeat, starmap, takewhile, tee
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from pdlcheck.worlds.observe import calls_tests, short
from pdlcheck.worlds.observe.callsite import KIND_OF_FILE
from pdlcheck.worlds.site import is_ours

__all__ = ["Place", "is_machinery", "place_of", "places_of", "user_traceback"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.join(_TORCH, "distributed") + os.sep
_OWN = tuple(str(Path(__file__).parents[1] / room) + os.sep for room in ("operations", "worlds"))
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = os.path.join(_LIBRARY, "site-packages") + os.sep
_ITS_PLACE = operator.attrgetter("f_lineno", "f_lasti")  # other attributes call audit hooks, which may be Python
_one_at_a_time = threading.Lock()


class Place:
    """The position of one thread at one moment.

    Args:
        words: ``in all_reduce at train.py:12``, ``at train.py:12``, or empty outside the user's code.
        stack: the frames, innermost last, as a traceback shows them.
        communicates: True if the thread is inside ``torch.distributed`` or a watched operation.
        mark: a value that is equal at two moments if the thread has not moved between them.
    """

    def __init__(self, words: str, stack: str, communicates: bool, mark: object) -> None:
        self.words = words
        self.stack = stack
        self.communicates = communicates
        self.mark = mark


class _Frame(NamedTuple):
    path: str
    line: int
    function: str


def place_of(thread_id: int) -> Place:
    """Return the position of the Python thread ``thread_id``."""
    return _place(_frames_of(thread_id))


def places_of(thread_ids: Mapping[int, int]) -> dict[int, Place]:
    """Return the positions of several threads, all at one moment, by name.

    The source lines are read after that, because it takes time.

    Args:
        thread_ids: name -> thread id.
    """
    return {name: _place(seen) for name, seen in [(name, _frames_of(each)) for name, each in thread_ids.items()]}


def _place(seen: Sequence[tuple[FrameType, tuple[int | None, int]]]) -> Place:
    frames = [_Frame(frame.f_code.co_filename, line or 0, frame.f_code.co_name) for frame, (line, _) in seen]
    mark = [(id(frame), instruction) for frame, (_, instruction) in seen]
    call, where, communicates = "", "", False
    for frame in frames:
        kind = KIND_OF_FILE[frame.path]
        if kind in ("user", "tests", "wrapper") and not _is_of_library(frame.path):
            if kind != "wrapper" or not where:  # use a wrapper's line only if no user's line follows
                where = f"at {short(frame.path)}:{frame.line}"
            if kind != "wrapper":
                break
        if frame.path.startswith(_DISTRIBUTED):
            communicates = True
            if frame.function != "wrapper":  # the name in torch's logging decorators
                call = frame.function
    words = f"in {call} {where}" if call and where else where
    return Place(words, _stack(frames), communicates, mark)


def _frames_of(thread_id: int) -> list[tuple[FrameType, tuple[int | None, int]]]:
    """Return the frames of a thread at one moment, innermost first, each with its line and its last instruction.

    No other thread runs meanwhile: one call of C code reads all frames, and no garbage collection interrupts it. On
    CPython 3.11, a new frame object may start a collection, and a finalizer may let other threads run. Then the frame
    may end, and its object reads whatever lies in that memory later.
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            innermost: Iterator[Any] = map(dict.get, starmap(sys._current_frames, [()]), [thread_id])
            frames, again = tee(takewhile(operator.truth, accumulate(chain(innermost, repeat("f_back")), getattr)))
            return list(zip(frames, map(_ITS_PLACE, again), strict=True))
        finally:
            if collects:
                gc.enable()


def user_traceback(error: BaseException) -> str:
    """Format an exception without the frames of code that runs the user's code on ranks."""
    formatted = traceback.TracebackException.from_exception(error)
    todo, seen = [formatted], set()
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        frames = [frame for frame in part.stack if not (frame.filename.startswith(_OWN) or is_ours(frame.filename))]
        part.stack = traceback.StackSummary.from_list(frames)
        todo += [link for link in (part.__cause__, part.__context__) if link is not None]
        todo += part.exceptions or []
    return "".join(formatted.format())


def _is_of_library(path: str) -> bool:
    return path.startswith(_LIBRARY) and not path.startswith(_PACKAGES)  # threading, contextlib, ...


def is_machinery(path: str) -> bool:
    """Return whether a file calls the user's code: a file of this package, or of pytest where a test runs."""
    return path == "<string>" or path.startswith(_OWN) or calls_tests(path)


def _stack(frames: Sequence[_Frame]) -> str:
    shown = [traceback.FrameSummary(*frame) for frame in reversed(frames) if not is_machinery(frame.path)]
    return "".join(traceback.StackSummary.from_list(shown).format())
