"""The functions given to ``torch.compile``, which simulated ranks run as they are written.

A process keeps one set of compiled code for all its threads. Dynamo puts ``dist.get_rank()`` into that code as a
constant, so the second rank would run the code of the first. On processes each rank compiles its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from pdlcheck.compat.patches import ABSENT, Patch
from pdlcheck.compat.torch.patched import STANCE
from pdlcheck.worlds.simulated.scheduling.scheduler import current_rank

__all__ = ["compile_patches"]


class _Stance:
    """The stance that ``torch.compiler.set_stance`` has set. On ranks it is always ``force_eager``."""

    def __init__(self, of_the_process: Any) -> None:
        self._of_the_process = of_the_process

    def __getattr__(self, name: str) -> Any:
        return "force_eager" if name == "stance" and current_rank() is not None else getattr(self._of_the_process, name)


def compile_patches(put_late: Callable[[], None]) -> tuple[Patch, ...]:
    """Return the patches that make ranks run a compiled function as it is written.

    Args:
        put_late: puts the patch of Dynamo, which ``torch.compile`` imports. The import takes long, and few programs
            need it.
    """

    def see_to_it(compile: Any) -> Any:
        @wraps(compile)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            function = compile(*args, **kwargs)
            put_late()
            return function

        return compiled

    why = "a process has one set of compiled code, and ranks are in it constants"
    return (
        Patch(torch, "compile", see_to_it, why),
        Patch(*STANCE, lambda real: real if real is ABSENT else _Stance(real), why),
    )
