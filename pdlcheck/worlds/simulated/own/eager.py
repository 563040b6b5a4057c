"""Simulated ranks run what was given to ``torch.compile`` as it is written.

A process keeps one set of compiled code for all its threads, and Dynamo puts ``dist.get_rank()`` into it as a constant:
the second rank would run the code of the first. On processes each rank compiles its own.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import torch

from pdlcheck.worlds.simulated.turns.scheduler import current_rank

__all__ = ["ranks_do_not_compile"]

_compile = torch.compile


class _Stance:
    """What ``torch.compiler.set_stance`` has set, for all but ranks."""

    def __init__(self, of_the_process: Any) -> None:
        self._of_the_process = of_the_process

    def __getattr__(self, name: str) -> Any:
        return "force_eager" if name == "stance" and current_rank() is not None else getattr(self._of_the_process, name)


def ranks_do_not_compile() -> None:
    """See to it, as soon as Dynamo is there; it takes long to import, and few need it."""
    torch.compile = _compile_and_see_to_it
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and hasattr(dynamo, "_stance") and type(dynamo._stance) is not _Stance:
        dynamo._stance = _Stance(dynamo._stance)


@wraps(_compile)
def _compile_and_see_to_it(*args: Any, **kwargs: Any) -> Any:
    compiled = _compile(*args, **kwargs)
    ranks_do_not_compile()
    return compiled
