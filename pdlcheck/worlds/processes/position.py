"""Where a thread is, in the words of the user's code: the communication call, the file, the line."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType

import torch

from pdlcheck.worlds.watch import calls_tests, short

__all__ = ["Place", "is_machinery", "place_of", "user_traceback"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.join(_TORCH, "distributed") + os.sep
_WORLDS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = os.path.join(_LIBRARY, "site-packages") + os.sep


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


def place_of(thread_id: int) -> Place:
    """Where the Python thread ``thread_id`` is."""
    innermost = sys._current_frames().get(thread_id)
    call, frame, communicates = "", innermost, False
    while frame is not None and _is_internal(frame):
        if frame.f_code.co_filename.startswith(_DISTRIBUTED):
            communicates = True
            if frame.f_code.co_name != "wrapper":  # of torch's logging decorators
                call = frame.f_code.co_name
        frame = frame.f_back
    where = f"at {short(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""
    mark = (id(innermost), innermost.f_lasti) if innermost is not None else None
    words = f"in {call} {where}" if call and where else where
    return Place(words, _stack(innermost), communicates, mark)


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


def _is_internal(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith((_TORCH, _WORLDS, "<frozen")):
        return True
    return path.startswith(_LIBRARY) and not path.startswith(_PACKAGES)  # threading, contextlib, ...


def is_machinery(path: str) -> bool:
    """What calls the user's code: this package's own files, and pytest's where a test runs."""
    return path == "<string>" or path.startswith(_WORLDS) or calls_tests(path)


def _stack(frame: FrameType | None) -> str:
    frames = [f for f in traceback.extract_stack(frame) if not is_machinery(f.filename)] if frame else []
    return "".join(traceback.StackSummary.from_list(frames).format())
