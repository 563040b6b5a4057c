"""The simulated cluster."""

from pdlcheck.worlds.simulated.world import SimulatedWorld

__all__ = ["SimulatedWorld"]
