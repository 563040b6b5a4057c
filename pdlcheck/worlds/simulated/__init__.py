"""The simulated world: ranks are threads of this process."""

from pdlcheck.worlds.simulated.world import SimulatedRanks, SimulatedWorld

__all__ = ["SimulatedRanks", "SimulatedWorld"]
