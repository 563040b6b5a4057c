"""The schedules: one file for each, all behind the protocol :class:`Schedule`."""

from pdlcheck.worlds.simulated.schedules.drawn import DrawnSchedule
from pdlcheck.worlds.simulated.schedules.exhaustive import Exhaustive
from pdlcheck.worlds.simulated.schedules.first import First
from pdlcheck.worlds.simulated.schedules.pct import PCT, pct_bound
from pdlcheck.worlds.simulated.schedules.protocol import Schedule, SwitchPoint, usual
from pdlcheck.worlds.simulated.schedules.replay import Recorder, Replay
from pdlcheck.worlds.simulated.schedules.search import Failure, search, search_all
from pdlcheck.worlds.simulated.schedules.shrink import shrink
from pdlcheck.worlds.simulated.schedules.spec import schedule_of
from pdlcheck.worlds.simulated.schedules.uniform import Random

__all__ = [
    "PCT",
    "DrawnSchedule",
    "Exhaustive",
    "Failure",
    "First",
    "Random",
    "Recorder",
    "Replay",
    "Schedule",
    "SwitchPoint",
    "pct_bound",
    "schedule_of",
    "search",
    "search_all",
    "shrink",
    "usual",
]
