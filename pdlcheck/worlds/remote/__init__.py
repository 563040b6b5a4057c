"""A world whose ranks run in processes that a function starts: on other machines, as jobs, actors or containers."""

from pdlcheck.worlds.remote.placement import RankJob
from pdlcheck.worlds.remote.serving import serve
from pdlcheck.worlds.remote.world import RemoteWorld

__all__ = ["RankJob", "RemoteWorld", "serve"]
