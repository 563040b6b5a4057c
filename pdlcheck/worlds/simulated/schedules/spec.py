"""The names of schedules on the command line."""

from __future__ import annotations

from pdlcheck.worlds.simulated.schedules.first import First
from pdlcheck.worlds.simulated.schedules.pct import PCT
from pdlcheck.worlds.simulated.schedules.protocol import Schedule
from pdlcheck.worlds.simulated.schedules.replay import Replay
from pdlcheck.worlds.simulated.schedules.uniform import Random

__all__ = ["schedule_of"]

_FORMS = "first, random[:SEED], pct:SEED[,DEPTH[,STEPS]] or replay:CODE"


def schedule_of(text: str, *, seed: int = 0) -> Schedule:
    """Return the schedule that ``text`` names.

    Args:
        text: ``first``, ``random:7``, ``pct:7,3``, ``pct:7,3,250`` or ``replay:4r1-17r0``.
        seed: used for ``random`` without a seed.

    Raises:
        ValueError: there is no such schedule.

    Example:
        >>> str(schedule_of("pct:7"))
        'pct:7,3,100'
    """
    name, colon, rest = text.partition(":")
    try:
        match name:
            case "first" if not colon:
                return First()
            case "random":
                return Random(int(rest) if colon else seed)
            case "pct" if rest and rest.count(",") < 3:
                return PCT(*map(int, rest.split(",")))
            case "replay" if colon:
                return Replay.parse(rest)
    except ValueError as error:
        raise ValueError(f"schedule must be {_FORMS}; got {text!r}: {error}") from None
    raise ValueError(f"schedule must be {_FORMS}; got {text!r}")
