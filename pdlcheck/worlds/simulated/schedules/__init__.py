"""Who goes on: one file a schedule, all behind :class:`Schedule`."""

from pdlcheck.worlds.simulated.schedules.exhaustive import Exhaustive
from pdlcheck.worlds.simulated.schedules.first import First
from pdlcheck.worlds.simulated.schedules.pct import PCT, pct_bound
from pdlcheck.worlds.simulated.schedules.protocol import Schedule, SwitchPoint, usual
from pdlcheck.worlds.simulated.schedules.replay import Recorder, Replay
from pdlcheck.worlds.simulated.schedules.spec import schedule_of
from pdlcheck.worlds.simulated.schedules.uniform import Random

__all__ = [
    "PCT",
    "Exhaustive",
    "First",
    "Random",
    "Recorder",
    "Replay",
    "Schedule",
    "SwitchPoint",
    "pct_bound",
    "schedule_of",
    "usual",
]
