"""What everything above the worlds knows about a world."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from pdlcheck.worlds.outcome import Outcome

if TYPE_CHECKING:
    from pdlcheck.clock import Timeline
    from pdlcheck.worlds.watch import Traffic

__all__ = ["CLOSED", "INSIDE", "NOT_SENT", "Ranks", "World"]

CLOSED = "these ranks were open for a block, `with world.open(...) as ranks:`, which has ended; open new ones"
INSIDE = (
    "world.run was called inside a {}; call it from the controller: a test with the marker world_size runs on every "
    "rank; remove the marker, checks and world.run take world_size themselves"
)
NOT_SENT = "a world cannot be sent to its ranks; inside the function use torch.distributed"


class Ranks(Protocol):
    """Ranks that were started once and are kept for several calls."""

    @property
    def world_size(self) -> int:
        """Their number."""

    @property
    def intact(self) -> bool:
        """False once a rank is gone or the block that opened them has ended: nothing further can run on them."""

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Like :meth:`World.run`, on these ranks."""

    def outcomes(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Outcome]:
        """Like :meth:`run`, and return how every rank ended instead of raising."""


class World(Protocol):
    """A place where ranks run.

    A new world is one module with these members and one line in ``pdlcheck.worlds.registry``.
    """

    @property
    def name(self) -> str:
        """What ``--world`` takes and what test ids show: ``sim``, ``gloo``."""

    isolation: str
    """How much runs share, where ranks outlive a run: ``pool``, ``reinit`` or ``fresh``."""

    @property
    def shares_process(self) -> bool:
        """True where the ranks are threads of this process, so that they see its objects."""

    def check(self) -> None:
        """Raise ``WorldUnavailable`` where this machine lacks what the ranks need."""

    def run(self, fn: Callable[..., Any], /, *args: Any, world_size: int, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

        The default process group is initialised in every rank; arguments are copied for each of them.

        Raises:
            The exception of the rank that failed first, with its own type; its notes tell about the others.
        """

    def open(self, world_size: int) -> AbstractContextManager[Ranks]:
        """Start ``world_size`` ranks and keep them, with their process group, for several calls."""

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages of the last run; raises ``Unsupported`` where nobody counts."""

    @property
    def timeline(self) -> Timeline:
        """The last run in virtual time; raises ``Unsupported`` where there is none."""

    def close(self) -> None:
        """Give back everything that the world holds: threads, processes, memory."""
