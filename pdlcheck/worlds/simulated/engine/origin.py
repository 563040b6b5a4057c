"""The origin of an asynchronous operation: a blocking call of torch, torch's own code, or the user's code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed.c10d_logger as c10d_logger
import torch.distributed.distributed_c10d as c10d

from pdlcheck.worlds.observe import Operation
from pdlcheck.worlds.observe.callsite import WRAPPERS

__all__ = ["Origin", "origin"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = tuple(str(Path(__file__).parents[3] / room) + os.sep for room in ("operations", "worlds"))
_PASSED_THROUGH = (c10d.__file__, c10d_logger.__file__, *WRAPPERS)
_THAT_WAIT = {"recv", "send"}  # functions of torch.distributed that wait for what they post


class Origin(NamedTuple):
    """The origin of an operation.

    Args:
        blocking: the call waits for the operation before it returns to its caller.
        torchs_own: torch's code called ``torch.distributed``, such as DDP's reducer; False if the user's code did.
        batch: the call of ``batch_isend_irecv`` that the operation belongs to.
    """

    blocking: bool
    torchs_own: bool
    batch: FrameType | None


_BLOCKING = Origin(blocking=True, torchs_own=False, batch=None)


class _Places(dict[str, str]):
    """The owner of a file, by its name: ``user``, ``torch``, ``passed through``, or empty for the worlds."""

    def __missing__(self, path: str) -> str:
        if path in _PASSED_THROUGH:
            place = "passed through"
        elif path.startswith(_OWN):
            place = ""
        else:
            place = "torch" if path.startswith(_TORCH) else "user"
        self[path] = place
        return place


_place_of = _Places()


def origin(operation: Operation | None = None) -> Origin:
    """Return the origin of the call under way, or of the ``operation`` that it posts.

    Blocking collectives declare it in their options. For everything else, the frames show it.
    """
    if operation is not None and operation.args and getattr(operation.args[-1], "asyncOp", True) is False:
        return _BLOCKING
    blocking, batch = False, None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        place = _place_of[frame.f_code.co_filename]
        if place == "passed through":
            name = frame.f_code.co_name
            blocking = blocking or name in _THAT_WAIT
            if name == "batch_isend_irecv":
                batch = frame
        elif place:
            return Origin(blocking, place == "torch", batch)
        frame = frame.f_back
    return Origin(blocking, True, batch)
