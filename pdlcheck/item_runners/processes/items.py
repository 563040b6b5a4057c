"""A marked item on rank processes: each process keeps a pytest session that runs the item's phases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import pytest

from pdlcheck.harness.collection.cases import Case, begins_with_group
from pdlcheck.harness.collection.same_parameters import note_differing, require_same_parameters
from pdlcheck.harness.fastpath.log_handlers import attach_quickly
from pdlcheck.harness.fastpath.prefetch import prefetchable_item
from pdlcheck.harness.fastpath.single_message import fits_single_message
from pdlcheck.harness.reporting.rank_reports import rank_reports
from pdlcheck.harness.reporting.verdicts import verdict
from pdlcheck.harness.running.folders import has_failed, shared_path
from pdlcheck.harness.running.next_item import Following, next_on_the_same_ranks
from pdlcheck.harness.running.time_limits import not_counted, read_marker, seconds_left
from pdlcheck.item_runners.processes.rank import session as rank_session
from pdlcheck.item_runners.processes.rank.session_description import SessionDescription, describe
from pdlcheck.item_runners.processes.rank_output import RankOutput
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller.templates import Beginning
from pdlcheck.worlds.processes.ranks import ProcessRanks

__all__ = ["ProcessItem", "finish"]

_collected = pytest.StashKey[set[tuple[object, ...]]]()
_description = pytest.StashKey[dict[str, SessionDescription]]()


class ProcessItem:
    """An implementation of ``RankedItem`` for worlds whose ranks are processes."""

    def __init__(self, item: pytest.Function, case: Case, world: ProcessWorld) -> None:
        self._item = item
        self._case = case
        self._world = world
        self._stack = ExitStack()
        self._ranks: ProcessRanks | None = None
        self._output = RankOutput(item, case.world_size)
        self._at_once = fits_single_message(item)
        self._where = _where(item)
        self._early = self._where if self._at_once else None  # the key of a call that may already run
        self._begun = False  # the ranks may hold fixtures of the item
        read_marker(item)
        attach_quickly(item.config)

    def setup(self) -> None:
        """Start or reuse the ranks, collect the file on them, and set up their fixtures."""
        __tracebackhide__ = True
        item = self._item
        with not_counted(item):  # shared work does not count against one test's limit
            beginning = _beginning(item, self._case.world) if self._world.isolation == "fresh" else None
            opened = self._world.open(self._case.world_size, beginning=beginning, begun=self._early)
            ranks = self._stack.enter_context(opened)
            ranks.read_with(self._output.read, live=self._output.live)
            self._stack.callback(ranks.read_with, None)
            ranks.keep_for_end()
            self._collect(ranks)
            require_same_parameters(item)
            if not begins_with_group(item):
                ranks.leave_group()
        self._ranks = ranks
        if not self._at_once:
            self._begun = True
            self._phase("setup", rank_session.setup, *self._where)

    def call(self, drawn: dict[str, Any]) -> None:
        """Run the body on every rank; an item with one message is set up and torn down too."""
        __tracebackhide__ = True
        assert self._ranks is not None
        if not self._ranks.intact:  # an earlier example failed and ended ranks
            self.teardown()
            self.setup()
        self._begun = True
        if not self._at_once:
            self._phase("call", rank_session.call, self._item.nodeid, **drawn)
            return
        self._begun = not all(self._phase("call", rank_session.run, *self._where, self._following()))
        if not self._begun:
            self._begin_next()

    def _begin_next(self) -> None:
        """Let the ranks run the next item while this process reports the current one."""
        following = prefetchable_item(self._item)
        if following is None or self._world.isolation != "pool" or self._output.live:
            return
        assert self._ranks is not None
        if (*self._ranks.pids, following.path) in self._item.config.stash[_collected]:
            where = _where(following)
            self._ranks.begin(where, rank_session.run, *where, next_on_the_same_ranks(following))

    def teardown(self) -> None:
        """Tear down the fixtures of every rank and release the ranks."""
        __tracebackhide__ = True
        with self._stack as stack:
            ranks, following = self._ranks, self._following()
            if ranks is not None and ranks.can_end and self._world.isolation != "fresh":  # new ranks will replace these
                following = None
                stack.callback(self._finish_session, ranks)
            if ranks is not None and (ranks.intact or ranks.can_end) and self._begun:
                what = self._item.nodeid, following, has_failed(self._item)
                self._phase("teardown", rank_session.teardown, *what)

    def _finish_session(self, ranks: ProcessRanks) -> None:
        __tracebackhide__ = True
        if ranks.can_end:  # otherwise they have already ended
            self._phase("teardown", rank_session.finish, int(self._item.session.testsfailed > 0))

    def _following(self) -> Following:
        """Return what runs next on these ranks; they end after this item if they are its own."""
        return None if self._world.isolation == "fresh" else next_on_the_same_ranks(self._item)

    def _collect(self, ranks: ProcessRanks) -> None:
        """Collect the item's file on the ranks, once for each file on the same processes."""
        __tracebackhide__ = True
        item = self._item
        collected = item.config.stash.setdefault(_collected, set())
        pids = (self._case.world_size,) if ranks.have_begun else ranks.pids  # forks of templates that have collected it
        what = (*pids, item.path)
        if what in collected:
            return
        if ranks.have_begun:
            outcomes = ranks.outcomes(rank_session.parameters, str(item.path))
        else:
            description = _describe(item.config, self._case.world)
            outcomes = ranks.outcomes(rank_session.collect, description, str(item.path), item.nodeid)
        self._output.tell("setup")
        note_differing(item.config, verdict(outcomes, rank_reports(item)))
        collected.add(what)

    def _phase(
        self, when: Literal["setup", "call", "teardown"], fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        __tracebackhide__ = True
        assert self._ranks is not None
        limit = seconds_left(self._item)
        # There is no limit for a person at the debugger.
        if limit is not None and self._item.config.getoption("--pdl-rank-pdb") is None:
            self._ranks.timeout_s = limit
        try:
            outcomes = self._ranks.end(self._early) or self._ranks.outcomes(fn, *args, **kwargs)
        finally:
            self._output.tell(when)
        return verdict(outcomes, rank_reports(self._item))


def finish(config: pytest.Config, world: ProcessWorld, exitstatus: int) -> None:
    """End the sessions in the ranks of a world; raise the first error of the fixtures that are torn down.

    If an item runs after all, new sessions begin. That item is the last one, run again.
    """
    config.stash.setdefault(_collected, set()).clear()
    world.isolation = "pool"  # use the ranks that were kept
    with ExitStack() as every_pool:
        for world_size in world.running():
            every_pool.callback(world.run, rank_session.finish, exitstatus, world_size=world_size)


def _where(item: pytest.Function) -> tuple[str, str, str]:
    return str(item.path), item.nodeid, str(shared_path(item))


def _beginning(item: pytest.Function, world: str) -> Beginning | None:
    """Return the collection with which each fresh rank of the file starts; None if the file no longer exists."""
    try:
        about = item.path.stat()
    except OSError:
        return None
    key = item.path, about.st_mtime_ns, about.st_size
    return Beginning(key, rank_session.collect, (_describe(item.config, world), str(item.path), item.nodeid))


def _describe(config: pytest.Config, world: str) -> SessionDescription:
    known = config.stash.setdefault(_description, {})
    if world not in known:
        known[world] = describe(config, world)
    return known[world]
