"""A rank that has no inputs left takes part in what the others still do, with nothing of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from pdlcheck.primitives.data_parallel.distributed import DistributedDataParallel

__all__ = ["Shadow"]


class Shadow(JoinHook):
    """Matches the communication of one iteration of ``wrapper`` at a time."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        self._wrapper._shadow_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._wrapper._take_final_model(is_last_joiner)
