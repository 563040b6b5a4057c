"""What everything above the worlds knows about a world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pdlcheck.worlds.outcome import Outcome

__all__ = ["World"]


class World(Protocol):
    """A place where ranks run.

    A new world is one module with these members and one line in ``pdlcheck.worlds.registry``.
    """

    @property
    def name(self) -> str:
        """What ``--world`` takes and what test ids show: ``sim``, ``gloo``."""

    @property
    def shares_process(self) -> bool:
        """True where the ranks are threads of this process, so that they see its objects."""

    def run(self, fn: Callable[..., Any], /, *args: Any, world_size: int, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

        The default process group is initialised in every rank; arguments are copied for each of them.

        Raises:
            The exception of the rank that failed first, with its own type; its notes tell about the others.
        """

    def outcomes(
        self, fn: Callable[..., Any], /, *args: Any, world_size: int, **kwargs: Any
    ) -> list[Outcome]:
        """Like :meth:`run`, and return how every rank ended instead of raising."""

    def close(self) -> None:
        """Give back everything that the world holds: threads, processes, memory."""
