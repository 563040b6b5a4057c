"""Functions that Dynamo, the tracer of ``torch.compile``, runs as they are written."""

from __future__ import annotations

from typing import Any, Literal

from pdlcheck.compat.private import take, uses

__all__ = ["skip_frames"]

_LOST = "torch.compile traces hooks and process groups, and fails or stores values of other ranks in a graph"

_eval_frame: Any = take("torch._C._dynamo.eval_frame", "functions that torch.compile must not trace", lost=_LOST)


@uses(
    "torch._C._dynamo.eval_frame._FrameAction",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    lost=_LOST,
)
def skip_frames(fn: Any, callees: Literal["DEFAULT", "SKIP"]) -> None:
    """Make torch.compile run a function as it is written.

    The function is marked for frames that are entered, and for calls that Dynamo finds while it traces another frame.

    Args:
        fn: a function written in Python.
        callees: ``SKIP`` if what it calls is not compiled either, else ``DEFAULT``.
    """
    if hasattr(_eval_frame, "set_code_exec_strategy"):  # a future torch without it may compile them correctly
        action = _eval_frame._FrameAction
        strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.__members__[callees])
        _eval_frame.set_code_exec_strategy(fn.__code__, strategy)
    # The second mark is read by torch._dynamo alone, an import of seconds, so it is not in the table of private names.
    vars(fn).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="it communicates")
