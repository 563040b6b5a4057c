"""The protocols through which all other layers use a world."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from pdlcheck.worlds.outcome import Outcome

if TYPE_CHECKING:
    from pdlcheck.clock import Timeline
    from pdlcheck.worlds.observe import Traffic

__all__ = ["CLOSED", "INSIDE", "NOT_SENT", "Ranks", "World"]

CLOSED = "these ranks were open for a block, `with world.open(...) as ranks:`, which has ended; open new ones"
INSIDE = (
    "world.run was called inside a {}; call it from the controller: a test with the marker world_size runs on every "
    "rank; remove the marker, checks and world.run take world_size themselves"
)
NOT_SENT = "a world cannot be sent to its ranks; inside the function use torch.distributed"


class Ranks(Protocol):
    """Ranks that are started once and kept for several calls."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""

    @property
    def intact(self) -> bool:
        """Return False once a rank has gone or the block that opened the ranks has ended: they take no more calls."""

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn`` as :meth:`World.run` does, on these ranks."""

    def outcomes(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Outcome]:
        """Call ``fn`` as :meth:`run` does, and return the outcome of every rank instead of raising."""


class World(Protocol):
    """A place where ranks run.

    A new world is one module with these members and one line in ``pdlcheck.worlds.registry``.
    """

    @property
    def name(self) -> str:
        """Return the value for ``--world``, which test ids also show: ``sim``, ``gloo``."""

    isolation: str
    """How much runs share, where ranks outlive a run: ``pool``, ``reinit`` or ``fresh``."""

    @property
    def shares_process(self) -> bool:
        """Return True if the ranks are threads of this process, so they see its objects."""

    def check(self) -> None:
        """Raise ``WorldUnavailable`` if this machine lacks something that the ranks need."""

    def run(self, fn: Callable[..., Any], /, *args: Any, world_size: int, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

        The default process group is initialised in every rank. Arguments are copied for each rank.

        Raises:
            Exception: the exception of the rank that failed first, with its own type; its notes describe the others.
        """

    def open(self, world_size: int) -> AbstractContextManager[Ranks]:
        """Start ``world_size`` ranks and keep them, with their process group, for several calls."""

    @property
    def traffic(self) -> Traffic:
        """Return the bytes and messages of the last run; raise ``Unsupported`` if the world does not count them."""

    @property
    def timeline(self) -> Timeline:
        """Return the last run in virtual time; raise ``Unsupported`` if there is none."""

    def close(self) -> None:
        """Release everything that the world holds: threads, processes, memory."""
