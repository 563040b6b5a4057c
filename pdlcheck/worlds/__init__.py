"""The places where ranks run: one protocol, and one module or folder per world.

Names are imported on first use, because the pytest plugin needs few of them in a session without ranks.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_HOMES = {
    "agreement": ("check_same_on_worlds",),
    "outcome": ("Outcome", "Raised", "Returned", "Stopped"),
    "protocol": ("Ranks", "World"),
    "registry": ("WORLDS", "get_world"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
