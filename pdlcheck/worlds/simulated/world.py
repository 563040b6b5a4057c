"""A cluster inside this process: ranks are threads under a seeded scheduler, found deadlocks are exact."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from pdlcheck.worlds.arguments import check_world_size
from pdlcheck.worlds.outcome import Outcome, results
from pdlcheck.worlds.simulated.c10d import join_group, rank_local_torch_distributed
from pdlcheck.worlds.simulated.network import Network
from pdlcheck.worlds.simulated.scheduler import current_rank
from pdlcheck.worlds.simulated.store import SimulatedStore

__all__ = ["SimulatedWorld"]

_one_run_at_a_time = threading.Lock()


class SimulatedWorld:
    """Runs functions on simulated ranks.

    Args:
        seed: chooses the schedule and the random streams of the ranks; the same seed replays the same run.

    Example:
        >>> import torch, torch.distributed as dist
        >>> def total():
        ...     x = torch.tensor([dist.get_rank() + 1.0])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> SimulatedWorld().run(total, world_size=4)
        [10.0, 10.0, 10.0, 10.0]
    """

    name = "sim"
    shares_process = True

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def run(self, fn: Callable[..., Any], /, *args: Any, world_size: int, **kwargs: Any) -> list[Any]:
        """See :class:`pdlcheck.worlds.protocol.World`."""
        return results(self.outcomes(fn, *args, world_size=world_size, **kwargs))

    def outcomes(
        self, fn: Callable[..., Any], /, *args: Any, world_size: int, **kwargs: Any
    ) -> list[Outcome]:
        """See :class:`pdlcheck.worlds.protocol.World`."""
        check_world_size(world_size)

        def body() -> Any:
            own_args, own_kwargs = deepcopy((args, kwargs))  # no rank sees what another does to its arguments
            return fn(*own_args, **own_kwargs)

        return self.run_bodies([body] * world_size)

    def run_bodies(self, bodies: Sequence[Callable[[], Any]]) -> list[Outcome]:
        """Call ``bodies[r]()`` as rank r of ``len(bodies)``."""
        if current_rank() is not None:
            raise RuntimeError("world.run was called inside a simulated rank; call it from the controller")
        world_size = len(bodies)
        network = Network(world_size, self.seed)
        store = SimulatedStore(network.scheduler)
        ranks = network.scheduler.ranks

        def as_rank(rank: int, body: Callable[[], Any]) -> Callable[[], Any]:
            def main() -> Any:
                ranks[rank].network = network
                join_group(rank, world_size, store)
                return body()

            return main

        with _one_run_at_a_time, rank_local_torch_distributed(ranks):
            return network.scheduler.run([as_rank(rank, body) for rank, body in enumerate(bodies)])

    def close(self) -> None:
        """Nothing is held between runs."""
