"""Where an asynchronous operation comes from: a blocking call of torch, torch's own code, or the user's."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed.c10d_logger as c10d_logger
import torch.distributed.distributed_c10d as c10d

from pdlcheck.worlds.watch.callsite import WRAPPERS

__all__ = ["Origin", "origin"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_WORLDS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PASSED_THROUGH = {c10d.__file__, c10d_logger.__file__, *WRAPPERS}
_BLOCKING = {"recv", "send"}  # functions of torch.distributed that wait for what they post


class Origin(NamedTuple):
    """Args:
    blocking: the call waits for the operation before it returns to its caller.
    torchs_own: torch's code called ``torch.distributed``, such as DDP's reducer; else the user's did.
    batch: the call of ``batch_isend_irecv`` that it belongs to.
    """

    blocking: bool
    torchs_own: bool
    batch: FrameType | None


def origin() -> Origin:
    """Look at the frames of the call under way."""
    blocking, batch = False, None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        if path in _PASSED_THROUGH:
            blocking = blocking or code.co_name in _BLOCKING
            if code.co_name == "batch_isend_irecv":
                batch = frame
        elif not path.startswith(_WORLDS):
            return Origin(blocking, path.startswith(_TORCH), batch)
        frame = frame.f_back
    return Origin(blocking, True, batch)
