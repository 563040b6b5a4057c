"""The note on a failure of code that needs CUDA, on a machine without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from pdlcheck.worlds.devices import why_no_cuda
from pdlcheck.worlds.exceptions import add_note, text_of

__all__ = ["COVERED", "HINT", "hint_about_cuda", "note_once"]

HINT = (
    "this machine has no CUDA ({}); --cuda-as-cpu, or get_world(..., cuda_as_cpu=True), runs the CUDA code of the "
    "ranks on the CPU"
)
COVERED = "--cuda-as-cpu does not cover this call; docs/cuda-as-cpu.md lists what it covers"

# texts of torch's errors, in the versions that pdlcheck is tested with
_WORDS = (
    "Torch not compiled with CUDA enabled",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver on your system",
    "Attempting to deserialize object on a CUDA device",
    "Cannot access accelerator device when none is available",
    "Cannot initialize CUDA without ATen_cuda library",
    "doesn't have NCCL built in",
    "ProcessGroupNCCL is only supported with GPUs",
    "No backend type associated with device type cuda",
    "Cannot get CUDA generator without ATen_cuda library",
    "Tried to instantiate dummy base class _Cuda",
    "Tried to instantiate dummy base class Stream",
    "Tried to instantiate dummy base class Event",
    "Tried to instantiate dummy base class CUDAGraph",
    "_cuda_",
    "with arguments from the 'CUDA' backend",
    "Need to provide pin_memory allocator",
    "no CUDA-capable device is detected",
    "device_id cuda",
    "device_id is an int, but no accelerator support is found",
)


@cache
def _why_no_cuda() -> str:
    return why_no_cuda()


def hint_about_cuda(error: BaseException, *, is_on: bool, why: Callable[[], str] = _why_no_cuda) -> str:
    """Return the note for an error that a rank's code has raised; empty for an error that is not about CUDA.

    Args:
        error: the error.
        is_on: whether the rank runs CUDA code on the CPU already.
        why: returns the reason why there is no CUDA device here, empty if there is one.

    Example:
        >>> hint_about_cuda(AssertionError("Torch not compiled with CUDA enabled"), is_on=True)
        '--cuda-as-cpu does not cover this call; docs/cuda-as-cpu.md lists what it covers'
    """
    if not isinstance(error, AssertionError | AttributeError | RuntimeError | NotImplementedError | ValueError):
        return ""
    text = text_of(error)
    if not any(words in text for words in _WORDS):
        return ""
    if is_on:
        return COVERED
    return HINT.format(reason) if (reason := why()) else ""


def note_once(error: BaseException, note: str) -> None:
    """Add a note to an error, unless the error has it already."""
    if note not in getattr(error, "__notes__", ()):
        add_note(error, note)
