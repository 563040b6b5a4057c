"""The lines of user code that an operation came from."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import importlib.util
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from os import getcwd
from types import FrameType

import torch
import typing_extensions

from pdlcheck import clock, compat, operations
from pdlcheck.compat.pytest.packages import PYTEST_PACKAGES
from pdlcheck.worlds.observe import comm_wrappers

__all__ = [
    "KIND_OF_FILE",
    "WRAPPERS",
    "calls_tests",
    "declare_wrappers",
    "end_at_user_line",
    "here",
    "short",
    "user_call",
    "user_frames",
    "user_line",
]

# library files that appear between a user's line and torch: context managers, deprecated names
WRAPPERS = (contextlib.__file__, typing_extensions.__file__, warnings.__file__)
# path prefixes of files that are not the user's
_WORLDS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INTERNAL = (
    os.path.dirname(torch.__file__) + os.sep,
    _WORLDS,
    os.path.dirname(clock.__file__) + os.sep,
    os.path.dirname(compat.__file__) + os.sep,
    os.path.dirname(operations.__file__) + os.sep,
    "<frozen",
    threading.__file__,  # it calls the first function of a thread
    concurrent.futures.thread.__file__,
    "<eval_with_key>",  # code that torch.compile generated
    os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "torchinductor_"),
    *WRAPPERS,
)
# path prefixes of files that call the user's tests or program
_PACKAGE = os.path.dirname(os.path.dirname(_WORLDS))
_specs = [importlib.util.find_spec(name) for name in PYTEST_PACKAGES]
_MACHINERY = (
    *(os.path.dirname(spec.origin) + os.sep for spec in _specs if spec is not None and spec.origin is not None),
    *(
        os.path.join(os.path.dirname(os.path.dirname(_WORLDS)), room) + os.sep
        for room in ("harness", "item_runners", "scripts")
    ),
)
_BOTTOM = os.path.join(_WORLDS, "simulated", "world.py")


class _Kinds(dict[str, str]):
    """The kind of a file, by its name; a dict, because each frame of each operation is looked up.

    The kinds are ``user``; ``wrapper``, a module through which a framework communicates; ``tests``, code that calls the
    user's tests; ``futures``, code that runs callbacks of futures, at any moment in a thread; ``bottom``, code that
    calls the user's code and is never called by it; and the empty string for torch's files and the worlds'.
    """

    def __missing__(self, path: str) -> str:
        if path.startswith(_INTERNAL):
            kind = {torch.futures.__file__: "futures", _BOTTOM: "bottom"}.get(path, "")
        else:
            kind = "tests" if path.startswith(_MACHINERY) else "user"
            if kind == "user" and comm_wrappers.is_comm_wrapper(path):
                kind = "wrapper"
        self[path] = kind
        return kind


_kinds = _Kinds()
KIND_OF_FILE: Mapping[str, str] = _kinds


def declare_wrappers(names: Sequence[str]) -> None:
    """Treat these modules as communication wrappers, besides the known ones: reports show the lines that call them."""
    if comm_wrappers.declare(names):
        _kinds.clear()


def user_frames() -> Iterator[FrameType]:
    """Yield the frames outside torch, the worlds and communication wrappers, innermost first.

    If there is none, yield the innermost frame of a wrapper.
    """
    frame: FrameType | None = sys._getframe(1)
    wrapper: FrameType | None = None
    seen = False
    while frame is not None:
        kind = KIND_OF_FILE[frame.f_code.co_filename]
        if kind == "bottom":
            break  # each frame object that Python creates costs as much as the rest of this loop
        if kind == "user" or kind == "tests":
            seen, wrapper = True, None
            yield frame
        elif kind == "wrapper" and wrapper is None and not seen:
            wrapper = frame
        frame = frame.f_back
    if wrapper is not None:
        yield wrapper


def user_call() -> tuple[FrameType, int] | None:
    """Return the innermost frame outside torch and the worlds, and the instruction that it is executing."""
    for frame in user_frames():
        return frame, frame.f_lasti
    return None


def user_line() -> str:
    """Return ``path:line`` of the innermost frame outside torch and the worlds; empty if there is none."""
    for frame in user_frames():
        return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""


def calls_tests(path: str) -> bool:
    """Return whether this is a file of pytest or of the harness."""
    return KIND_OF_FILE[path] == "tests"


def short(path: str) -> str:
    """Return ``path`` relative to the working directory, if it lies below it."""
    return _below(here(), path)


def here() -> str:
    """Return the working directory; empty if it has been deleted."""
    try:
        return getcwd()
    except FileNotFoundError:
        return ""


@lru_cache(maxsize=4096)
def _below(directory: str, path: str) -> str:
    if not directory:
        return path
    relative = os.path.relpath(path, directory)
    return path if relative.startswith("..") else relative


def end_at_user_line(error: BaseException) -> None:
    """Cut the frames of torch and of the worlds off the end of a traceback that contains a user's line."""
    last, entry = None, error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(_INTERNAL):
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
