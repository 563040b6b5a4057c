"""The world ``ray``: each rank is forked by an actor of a Ray cluster, in a bundle of a placement group."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from pdlcheck.errors import WorldTooSmall, WorldUnavailable
from pdlcheck.extras import extra
from pdlcheck.time_budgets import RAY_ROOM_S
from pdlcheck.worlds.remote import RemoteWorld, serve

with extra("ray", "world ray"):
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

__all__ = ["RayWorld", "make"]


class _Actor:
    """The process of one rank."""

    def serve(self, variables: dict[str, str]) -> int:
        """Fork ranks until the controller ends this."""
        return serve(variables)


class _Job:
    """An actor as a ``RankJob``."""

    def __init__(self, actor: Any, ends: Any) -> None:
        self._actor = actor
        self._ends = ends

    def poll(self) -> int | None:
        """Return None while the actor serves."""
        if not ray.is_initialized():  # somebody has left the cluster; a call of Ray would start another one
            return 1
        done, _ = ray.wait([self._ends], timeout=0.0)
        if not done:
            return None
        try:
            return int(ray.get(done[0]))
        except Exception:  # Ray's error for an actor that has died, or what it raised
            return 1

    def kill(self) -> None:
        """End the actor."""
        if ray.is_initialized():
            with suppress(Exception):  # its cluster has ended, and another one was joined
                ray.kill(self._actor)


class RayWorld(RemoteWorld):
    """Ranks in actors of a Ray cluster, with gloo or nccl between them.

    It joins the cluster that ``RAY_ADDRESS`` or ``ray start`` on this machine names; without one it starts a cluster of
    this machine, and ends it with :meth:`close`. pdlcheck must be installed on all nodes, and the files of the tests
    must have the same path there.

    Args:
        device: ``cpu``: each rank needs one CPU, and gloo is used. ``cuda``: each rank also needs one GPU, and nccl is
            used.
        strategy: how a placement group spreads the ranks over the nodes: ``SPREAD``, ``PACK``, ``STRICT_SPREAD`` or
            ``STRICT_PACK``, see Ray's documentation of placement groups.
        options: those of :class:`pdlcheck.worlds.processes.ProcessWorld`.

    Raises:
        WorldTooSmall: the cluster has no room for the ranks within 30 s.
    """

    def __init__(self, *, device: str = "cpu", strategy: str = "SPREAD", **options: Any) -> None:
        self._own_cluster = False
        self._needs = {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})
        self._strategy = strategy
        self._places: list[PlacementGroupSchedulingStrategy] = []  # by rank
        backend = "nccl" if device == "cuda" else "gloo"
        super().__init__("ray", self._start_actor, reserve=self._reserve, backend=backend, device=device, **options)

    def check(self) -> None:
        """Join the cluster; raise ``WorldUnavailable`` if there is none and none can be started."""
        if not ray.is_initialized():
            try:
                ray.init(log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, OSError, RuntimeError) as error:
                raise WorldUnavailable(f"Ray does not start: {error}", world="ray", cure="ray start --head") from error
            self._own_cluster = True
            self._remote.host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        super().check()

    def close(self) -> None:
        """End the actors, and leave the cluster if this world has joined or started it."""
        super().close()
        for group in {place.placement_group.id: place.placement_group for place in self._places}.values():
            if ray.is_initialized():
                remove_placement_group(group)
        self._places.clear()
        if self._own_cluster and ray.is_initialized():
            ray.shutdown()
        self._own_cluster = False

    def _reserve(self, world_size: int) -> None:
        """Reserve the places of the ranks that have none yet, in one placement group."""
        more = world_size - len(self._places)
        if more <= 0:
            return
        group = placement_group([self._needs] * more, strategy=self._strategy)
        if not group.wait(RAY_ROOM_S):
            remove_placement_group(group)
            what = " and ".join(f"one {name}" for name in self._needs)
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            there = int(min(resources.get(name, 0) for name in self._needs))
            cure = f"add nodes to the cluster, or ask for world_size={there}"
            raise WorldTooSmall(
                f"needs {world_size} ranks with {what} each, and the Ray cluster did not have room for them within "
                f"{RAY_ROOM_S:g} s; it has {there} in all, other jobs included: {cure}",
                world="ray",
                cure=cure,
                world_size=world_size,
                available=there,
            )
        self._places += [
            PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            for index in range(more)
        ]

    def _start_actor(self, rank: int, variables: dict[str, str]) -> _Job:
        cpus, gpus = self._needs["CPU"], self._needs.get("GPU", 0)
        kind = ray.remote(_Actor).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy=self._places[rank]
        )
        actor: Any = kind.remote()
        return _Job(actor, actor.serve.remote(variables))


def make(**options: Any) -> RayWorld:
    """Return the world ``ray``; the options are those of :class:`RayWorld`."""
    return RayWorld(**options)
