"""Where ranks run: one protocol, one module or folder a world."""

from pdlcheck.worlds.agreement import check_same_on_worlds
from pdlcheck.worlds.outcome import Outcome, Raised, Returned, Stopped
from pdlcheck.worlds.protocol import Ranks, World
from pdlcheck.worlds.registry import WORLDS, get_world

__all__ = [
    "WORLDS",
    "Outcome",
    "Raised",
    "Ranks",
    "Returned",
    "Stopped",
    "World",
    "check_same_on_worlds",
    "get_world",
]
