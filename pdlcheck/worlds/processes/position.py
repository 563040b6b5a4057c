"""Where a thread is, in the words of the user's code: the communication call, the file, the line."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pdlcheck.worlds.watch import calls_tests, short

__all__ = ["Place", "is_machinery", "place_of", "user_traceback"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.join(_TORCH, "distributed") + os.sep
_WORLDS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = os.path.join(_LIBRARY, "site-packages") + os.sep
_ALONE_S, _SLACK_S = 0.1, 0.001  # until another thread may ask for the interpreter; for clocks
_one_at_a_time = threading.Lock()


class Place:
    """The position of one thread at one moment.

    Args:
        words: ``in all_reduce at train.py:12``, ``at train.py:12``, or empty outside the user's code.
        stack: the frames, innermost last, as a traceback shows them.
        communicates: the thread is inside ``torch.distributed`` or a watched operation.
        mark: equal for two moments between which the thread has not moved.
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
    """Where the Python thread ``thread_id`` is."""
    frames, mark = _frames_of(thread_id)
    call, where, communicates = "", "", False
    for frame in frames:
        if not _is_internal(frame.path):
            where = f"at {short(frame.path)}:{frame.line}"
            break
        if frame.path.startswith(_DISTRIBUTED):
            communicates = True
            if frame.function != "wrapper":  # of torch's logging decorators
                call = frame.function
    words = f"in {call} {where}" if call and where else where
    return Place(words, _stack(frames), communicates, mark)


def _frames_of(thread_id: int) -> tuple[list[_Frame], object]:
    """The frames of a thread, innermost first, and a mark of where it is.

    Nobody else runs meanwhile: when a frame ends while another thread goes from it to its caller, the caller may be any
    piece of memory, as CPython 3.11 does that.
    """
    frames: list[_Frame] = []
    with _one_at_a_time:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(_ALONE_S)
        try:
            until = time.perf_counter() + usual + _SLACK_S
            while time.perf_counter() < until:
                pass  # a thread that has asked for the interpreter before gets it yet
            frame = sys._current_frames().get(thread_id)
            mark = (id(frame), frame.f_lasti) if frame is not None else None
            while frame is not None:
                frames.append(_Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
                frame = frame.f_back
        finally:
            sys.setswitchinterval(usual)
    return frames, mark


def user_traceback(error: BaseException) -> str:
    """Format an exception without the frames of the worlds."""
    formatted = traceback.TracebackException.from_exception(error)
    todo, seen = [formatted], set()
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        frames = [frame for frame in part.stack if not frame.filename.startswith(_WORLDS)]
        part.stack = traceback.StackSummary.from_list(frames)
        todo += [link for link in (part.__cause__, part.__context__) if link is not None]
        todo += part.exceptions or []
    return "".join(formatted.format())


def _is_internal(path: str) -> bool:
    if path.startswith((_TORCH, _WORLDS, "<frozen")):
        return True
    return path.startswith(_LIBRARY) and not path.startswith(_PACKAGES)  # threading, contextlib, ...


def is_machinery(path: str) -> bool:
    """What calls the user's code: this package's own files, and pytest's where a test runs."""
    return path == "<string>" or path.startswith(_WORLDS) or calls_tests(path)


def _stack(frames: Sequence[_Frame]) -> str:
    shown = [traceback.FrameSummary(*frame) for frame in reversed(frames) if not is_machinery(frame.path)]
    return "".join(traceback.StackSummary.from_list(shown).format())
