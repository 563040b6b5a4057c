"""The private names of ``torch.distributed.pipelining``."""

from __future__ import annotations

import sys
from types import FrameType

from pdlcheck.compat.private import uses

__all__ = ["infers_shapes"]

_INFERENCE = {"_forward_metadata_inference", "_shape_inference"}
_FRAMES = 12  # between the call of a stage's module and a hook of the module


@uses(
    "torch.distributed.pipelining.stage.PipelineStage._forward_metadata_inference "
    "or torch.distributed.pipelining.stage.PipelineStage._shape_inference",
    lost="pdlcheck.trace counts the first call of a stage as a micro-batch",
)
def infers_shapes() -> bool:
    """Return whether a stage calls its module to find out shapes, before the first micro-batch."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name in _INFERENCE:
            return True
        frame = frame.f_back
    return False
