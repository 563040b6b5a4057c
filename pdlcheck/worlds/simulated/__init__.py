"""The simulated cluster."""

from pdlcheck.worlds.simulated.world import SimulatedRanks, SimulatedWorld

__all__ = ["SimulatedRanks", "SimulatedWorld"]
