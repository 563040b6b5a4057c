"""What a simulated cluster can be made to suffer: plain data for ``SimulatedWorld(faults=[...])``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Kill"]


@dataclass(frozen=True)
class Kill:
    """The rank ends without a word when it is about to post its operation of that number, counted from 0 in each run.

    Its peers see what they see on gloo: operations that need the rank raise ``RuntimeError: Connection closed by
    peer``, those among survivors go on. Unlike a process, the rank's thread unwinds: ``finally`` blocks run,
    communication in them does not.
    """

    rank: int
    operation: int
