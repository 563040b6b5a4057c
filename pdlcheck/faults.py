"""What a simulated cluster can be made to suffer: plain data for ``SimulatedWorld(faults=[...])``."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Kill", "Slow"]


@dataclass(frozen=True)
class Kill:
    """The rank ends without a word when it is about to post its operation of that number, counted from 0 in each run.

    Its peers see what they see on gloo: operations that need the rank raise ``RuntimeError: Connection closed by
    peer``, those among survivors go on. Unlike a process, the rank's thread unwinds: ``finally`` blocks run,
    communication in them does not.
    """

    rank: int
    operation: int


@dataclass(frozen=True)
class Slow:
    """The rank's ``pdlcheck.clock.compute`` takes ``factor`` times as long, on the virtual clock: a straggler.

    Its links are as fast as before; ``Topology(links=...)`` makes some slower.

    Raises:
        ValueError: ``factor`` is not positive, or infinite.
    """

    rank: int
    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor must be positive and finite, got {self.factor!r}; pass 2.0 for half the speed")
