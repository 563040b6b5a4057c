"""Where ranks run: one protocol, one module or folder a world."""

from pdlcheck.worlds.outcome import Outcome, Raised, Returned, Stopped
from pdlcheck.worlds.protocol import World
from pdlcheck.worlds.registry import WORLDS, get_world

__all__ = ["WORLDS", "Outcome", "Raised", "Returned", "Stopped", "World", "get_world"]
