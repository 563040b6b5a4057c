"""A world whose ranks are Ray actors."""

from pdlcheck.worlds.ray.world import RayWorld, make

__all__ = ["RayWorld", "make"]
