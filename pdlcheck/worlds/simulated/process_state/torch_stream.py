"""The random stream of torch on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pdlcheck.worlds.simulated.process_state.protocol import Rank, RunState

__all__ = ["TorchStream"]


class TorchStream(RunState):
    """The state of torch's default generator. Runs start from the seed, or where a set-up run has ended."""

    def capture(self) -> Tensor:
        """Return the state of the generator."""
        return torch.default_generator.get_state()

    def apply(self, state: Tensor) -> None:
        """Set the state of the generator."""
        torch.default_generator.set_state(state)

    def begin(self, rank: Rank, kept: Tensor | None) -> Tensor | None:
        """Start the stream of a run."""
        if kept is None:
            torch.default_generator.manual_seed(rank.seed)
        else:
            self.apply(kept)
        return kept

    def end(self, rank: Rank, kept: Tensor | None) -> Tensor | None:
        """Return the state from which the next run starts; None: from the seed."""
        return self.capture() if rank.begins_here else kept
