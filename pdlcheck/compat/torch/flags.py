"""The flags that torch keeps for the whole process in C++, with the functions that read and set them.

These are the functions of C++ themselves, because a switch between simulated ranks calls all of them. torch's public
functions wrap them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pdlcheck.compat.private import name, take

__all__ = ["FLAGS", "deterministic_algorithms", "set_deterministic_algorithms", "warns_only_of_nondeterminism"]


def _function(attribute: str, flag: str) -> Callable[..., Any] | None:
    purpose, lost = f"a flag of {flag} for each simulated rank", f"simulated ranks share the flag of {flag}"
    row = name(f"torch._C.{attribute}", purpose, lost=lost)
    return getattr(row.owner, attribute, None)


def _flags(*rows: tuple[str, str, str]) -> tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...]:
    pairs = [(_function(get, flag), _function(put, flag)) for get, put, flag in rows]
    return tuple([(get, put) for get, put in pairs if get is not None and put is not None])


FLAGS: Final = _flags(  # each flag that the installed torch has: the function that reads it, and the one that sets it
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash", "flash attention"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient", "memory-efficient attention"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math", "attention without fused kernels"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn", "attention by cuDNN"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled", "oneDNN"),
    ("_get_float32_matmul_precision", "_set_float32_matmul_precision", "the precision of products in float32"),
)

_PURPOSE: Final = "a flag of deterministic algorithms for each simulated rank"
_LOST: Final = "the simulated world"
deterministic_algorithms = take("torch._C._get_deterministic_algorithms", _PURPOSE, lost=_LOST)
warns_only_of_nondeterminism = take("torch._C._get_deterministic_algorithms_warn_only", _PURPOSE, lost=_LOST)
set_deterministic_algorithms = take(
    "torch._C._set_deterministic_algorithms", _PURPOSE, lost="a simulated rank cannot set this flag for itself"
)
