"""The ranks that a user of a process world keeps for several calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdlcheck.worlds.arguments import check_function
from pdlcheck.worlds.outcome import Outcome, results
from pdlcheck.worlds.processes.controller.pool import Pool
from pdlcheck.worlds.processes.controller.rank_handle import Written
from pdlcheck.worlds.processes.exchange.messages import DefaultGroup
from pdlcheck.worlds.processes.exchange.payload import dump_call, is_our_own
from pdlcheck.worlds.processes.exchange.warning_relay import present_filters, replay_warnings
from pdlcheck.worlds.protocol import CLOSED

__all__ = ["ProcessRanks"]


class ProcessRanks:
    """The processes of one pool; settings and random streams start afresh with the first call.

    Args:
        pool: running processes.
        seed: the seed of the random streams.
        timeout_s: the time limit of each call; may be changed between calls.
        rejoin: True to leave all groups and join a new default group before the first call.
        debugged: a rank in which a person uses a debugger; it is not stopped when another rank fails.
    """

    def __init__(
        self, pool: Pool, seed: int, timeout_s: float, *, rejoin: bool = False, debugged: int | None = None
    ) -> None:
        self._pool = pool
        self._first_seed = seed
        self._seed: int | None = seed
        self.timeout_s = timeout_s
        self._group: DefaultGroup = "new" if rejoin or pool.lacks_group else "kept"
        self._debugged = debugged
        self._is_closed = False
        self.have_begun = False  # they are forks of templates that have done the beginning

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._pool.world_size

    @property
    def intact(self) -> bool:
        """Return whether the processes can serve calls.

        They cannot after :meth:`close`, or after a failure that left something half done.
        """
        return self._can_be_called and not self._pool.is_spent

    @property
    def can_end(self) -> bool:
        """Return whether teardown can run on the processes and must run now, because they serve no other user."""
        return self._can_be_called and (self._pool.is_spent or self._pool.is_worn)

    @property
    def _can_be_called(self) -> bool:
        return self._pool.is_usable and not self._is_closed

    def keep_for_end(self) -> None:
        """Keep live ranks until :meth:`close`, even if only teardown may run on them; see :attr:`can_end`."""
        self._pool.to_be_ended = True

    def leave_group(self) -> None:
        """Begin later calls without a process group, or with the groups that the calls before them have made."""
        self._group = "none"

    @property
    def pids(self) -> list[int]:
        """Return the process ids, in rank order."""
        return self._pool.pids

    def read_with(self, reader: Callable[[Written], None] | None, *, live: bool = False) -> None:
        """Pass the ranks' output to ``reader``, after each call or at once, until this is called with None."""
        self._pool.read_with(reader, live=live)

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function on every rank and return the results; see :class:`pdlcheck.worlds.protocol.Ranks`."""
        __tracebackhide__ = True
        return results(self.outcomes(fn, *args, **kwargs))

    def outcomes(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Outcome]:
        """Run a function on every rank and return the outcomes; see :class:`pdlcheck.worlds.protocol.Ranks`."""
        __tracebackhide__ = True
        check_function(fn)
        payload, modules = dump_call(fn, args, kwargs)
        if self._is_closed:
            raise RuntimeError(CLOSED)
        if not self._can_be_called:
            raise RuntimeError("these ranks are gone, as an earlier call failed on them; open new ones")
        seed, self._seed = self._seed, None
        group, self._group = self._group, "kept"
        filters = None if is_our_own(fn) else present_filters()
        timeout_s, debugged = self.timeout_s, self._debugged
        outcomes = self._pool.call(
            payload, modules, seed=seed, group=group, timeout_s=timeout_s, debugged=debugged, filters=filters
        )
        replay_warnings(self._pool.heard)
        return outcomes

    def begin(self, key: object, fn: Callable[..., Any], /, *args: Any) -> None:
        """Start ``fn(*args)`` for the next user who opens the world with this key; :meth:`end` returns the outcomes."""
        if self.intact and not self._pool.is_worn:
            self._pool.begin(key, *dump_call(fn, args, {}), seed=self._first_seed)

    def end(self, key: object) -> list[Outcome] | None:
        """Return the outcomes of the call that was begun with this key; None if there is none."""
        if key is None or self._pool.begun != key:
            return None
        self._seed = None
        return self._pool.end(self.timeout_s)

    def close(self) -> None:
        """End the use of the ranks by the block that opened them; another block may use the processes."""
        self._is_closed = True
        self._pool.to_be_ended = False
        if self._pool.is_spent:
            self._pool.kill()
