"""A cluster inside this process: ranks are threads under a seeded scheduler, found deadlocks are exact."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from pdlcheck.worlds.arguments import check_world_size
from pdlcheck.worlds.outcome import Outcome, Raised, Returned, results
from pdlcheck.worlds.semantics import Semantics, make_semantics
from pdlcheck.worlds.simulated.c10d import join_group, rank_local_torch_distributed
from pdlcheck.worlds.simulated.network import Network
from pdlcheck.worlds.simulated.scheduler import current_rank
from pdlcheck.worlds.simulated.store import SimulatedStore

__all__ = ["SimulatedWorld"]

_one_cluster_at_a_time = threading.RLock()
_open_clusters: set[int] = set()  # by thread: the lock would let one thread in twice


class SimulatedWorld:
    """Runs functions on simulated ranks.

    Args:
        seed: chooses the schedule and the random streams of the ranks; the same seed replays the same run.
        semantics: what the network does where the rules leave a choice; a :class:`Semantics` or the name of a profile.

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
    isolation = "fresh"  # threads cost next to nothing
    shares_process = True

    def __init__(self, *, seed: int = 0, semantics: Semantics | str = "rendezvous") -> None:
        self.seed = seed
        self.semantics = make_semantics(semantics)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seed={self.seed})"

    def check(self) -> None:
        """Nothing is needed."""

    def run(self, fn: Callable[..., Any], /, *args: Any, world_size: int, **kwargs: Any) -> list[Any]:
        """See :class:`pdlcheck.worlds.protocol.World`."""
        __tracebackhide__ = True
        with self.open(world_size) as ranks:
            return ranks.run(fn, *args, **kwargs)

    @contextmanager
    def open(self, world_size: int) -> Iterator[SimulatedRanks]:
        """Start ``world_size`` ranks and keep them, with their process group, while the block runs."""
        check_world_size(world_size)
        if current_rank() is not None:
            raise RuntimeError("world.run was called inside a simulated rank; call it from the controller")
        me = threading.get_ident()
        if me in _open_clusters:
            raise RuntimeError("a simulated cluster is open in this thread already; use that one, or close it first")
        with ExitStack() as stack:
            stack.enter_context(_one_cluster_at_a_time)
            stack.callback(_open_clusters.discard, me)
            _open_clusters.add(me)
            stack.enter_context(rank_local_torch_distributed())
            ranks = SimulatedRanks(world_size, self.seed, self.semantics)
            stack.callback(ranks.close)
            yield ranks

    def close(self) -> None:
        """Nothing is held between runs."""


class SimulatedRanks:
    """Ranks that stay for several runs; after a failure they get a fresh process group."""

    def __init__(self, world_size: int, seed: int, semantics: Semantics) -> None:
        self.world_size = world_size
        self._network = Network(world_size, seed, semantics)
        self._store = SimulatedStore(self._network.scheduler)
        self._joined = False

    intact = True  # a thread cannot be lost

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """See :class:`pdlcheck.worlds.protocol.Ranks`."""
        __tracebackhide__ = True
        return results(self.outcomes(fn, *args, **kwargs))

    def outcomes(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Outcome]:
        """See :class:`pdlcheck.worlds.protocol.Ranks`."""

        def body() -> Any:
            __tracebackhide__ = True
            own_args, own_kwargs = deepcopy((args, kwargs))  # no rank sees what another does to its arguments
            return fn(*own_args, **own_kwargs)

        return self.run_bodies([body] * self.world_size)

    def run_bodies(self, bodies: Sequence[Callable[[], Any]]) -> list[Outcome]:
        """Call ``bodies[r]()`` as rank r."""
        join = not self._joined

        def as_rank(rank: int, body: Callable[[], Any]) -> Callable[[], Any]:
            def main() -> Any:
                __tracebackhide__ = True
                if join or not dist.is_initialized():  # a program that ends its group leaves none to the next
                    join_group(self._network, self._store, self.world_size)
                try:
                    return body()
                finally:
                    self._network.leave(rank)

            return main

        self._network.begin()
        ended = self._network.scheduler.run([as_rank(rank, body) for rank, body in enumerate(bodies)])
        if all(isinstance(outcome, Returned) for outcome in ended) and (leaks := self._network.leaks()):
            ended[0] = Raised(0, leaks)
        outcomes = [replace(outcome, last=str(self._network.last.get(outcome.rank, ""))) for outcome in ended]
        self._joined = all(isinstance(outcome, Returned) for outcome in outcomes)
        if not self._joined:
            self._network.reset()
            self._store = SimulatedStore(self._network.scheduler)
        return outcomes

    def close(self) -> None:
        """End the rank threads."""
        self._network.scheduler.close()
