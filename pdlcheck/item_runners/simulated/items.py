"""A marked item on simulated ranks: all ranks are in this process, each with its own function-scoped fixtures.

pytest keeps one value of a fixture at a time. Therefore each rank has a copy of the item, with copies of the
definitions of its function-scoped fixtures. Their finalizers run at the item's teardown, last rank first. Fixtures of
wider scope are set up once for all ranks, before the others.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pdlcheck.compat.pytest.fixtures import argument_names, definitions_of
from pdlcheck.compat.pytest.item_copies import show_copy
from pdlcheck.compat.pytest.items import (
    begin_request,
    fill_fixtures,
    make_instance,
    notes_of,
    put_notes,
    request_of,
    results_key,
)
from pdlcheck.errors import Deadlock, RankTimeout
from pdlcheck.faults import DrawnFaults
from pdlcheck.harness.collection.cases import CASE, Case, begins_with_group
from pdlcheck.harness.collection.marker_validation import require_own_values
from pdlcheck.harness.collection.schedules import runs_under_schedules
from pdlcheck.harness.fastpath.log_handlers import attach_quickly
from pdlcheck.harness.fastpath.single_message import fits_single_message
from pdlcheck.harness.rank_context import RankContext, leave_rank_context, set_rank_context
from pdlcheck.harness.reporting.properties import record
from pdlcheck.harness.reporting.rank_subtests import report
from pdlcheck.harness.reporting.verdicts import verdict
from pdlcheck.harness.running.examples import draw_schedule, is_property, note_schedule
from pdlcheck.harness.running.folders import empty_shared
from pdlcheck.harness.running.time_limits import deadline, read_marker
from pdlcheck.item_runners.simulated.own_fixtures import follow_log, in_force
from pdlcheck.item_runners.simulated.rank_fixtures import FixturePhase
from pdlcheck.item_runners.simulated.rank_items import ONCE_FOR_ALL, RankItem, SharedSetUps, release
from pdlcheck.item_runners.simulated.schedules import search_schedules
from pdlcheck.worlds.devices import device_name
from pdlcheck.worlds.outcome import Outcome, Raised
from pdlcheck.worlds.simulated import SimulatedRanks, SimulatedWorld
from pdlcheck.worlds.simulated.process_state.arguments import own_copy
from pdlcheck.worlds.simulated.schedules import DrawnSchedule, First, Replay, Schedule, SwitchPoint
from pdlcheck.worlds.simulated.scheduling.scheduler import running_rank

__all__ = ["SimulatedItem"]

_ASYNC = (
    "the body of an async test cannot run on simulated ranks; write a plain function, or let pytest-asyncio run it on "
    "processes, with --world gloo"
)


class SimulatedItem:
    """An implementation of ``RankedItem`` for the simulated world."""

    def __init__(self, item: pytest.Function, case: Case, world: SimulatedWorld) -> None:
        self._item = item
        self._case = case
        self._world = world
        # All ranks have this device.
        self._device = torch.device("cpu" if world.device == "cpu" else device_name(0, devices=1))
        self._own_devices = world.device == "cuda" and world.cuda_as_cpu
        self._ranks: list[RankItem] = []
        self._stack = ExitStack()
        self._at_once = fits_single_message(item)
        self._is_async = False
        self._is_late = False
        self._given_up = False  # a time limit has ended the set-up
        self._called: Callable[..., Any] | None = None  # a plugin's wrapper to call instead of the bodies
        self._aside: BaseException | None = None  # the first skip or expected failure under a schedule
        read_marker(item)
        attach_quickly(item.config)

    def setup(self) -> None:
        """Create the ranks, and set up the fixtures of each."""
        __tracebackhide__ = True
        if inspect.iscoroutinefunction(self._item.obj):
            self._is_async = True
            self._item.obj = _stand_still  # a plugin for async tests would otherwise call the body once, without ranks
            return
        self._cluster: SimulatedRanks = self._stack.enter_context(self._world.open(self._case.world_size))
        if not begins_with_group(self._item):
            self._cluster.leave_group()
        shared_set_ups: SharedSetUps = {}
        self._ranks = [RankItem(self._item, shared_set_ups) for _ in range(self._case.world_size)]
        if self._at_once:
            fill = [partial(self._as_rank, rank, partial(self._fill, mine)) for rank, mine in enumerate(self._ranks)]
            ended = self._run_bodies(fill, faults=())
        else:
            ended = self._set_up_ranks()
            self._tell()
        show_copy(self._item, self._ranks[-1].item)
        verdict(ended)
        self._stand_in()

    def _stand_in(self) -> None:
        """Let a method that a plugin's hook wraps around the call be the method of each rank's own instance."""
        item = self._item
        if item.cls is not None and not is_property(item):

            @wraps(item.obj)
            def each_ranks_own(*args: Any, **kwargs: Any) -> Any:
                return self._ranks[running_rank().rank].body(*args, **kwargs)

            item.obj = each_ranks_own
        self._plain = item.obj

    def _set_up_ranks(self) -> list[Outcome]:
        __tracebackhide__ = True
        fill = [partial(self._in_phase, rank, partial(self._fill, mine)) for rank, mine in enumerate(self._ranks)]
        if any(one.cached_result is None or one.params for one in _wide(self._item)):
            first = self._on_rank(0, partial(self._as_rank, 0, self._fill_wide))
            self._cluster.give_to_controller(0)
            if isinstance(first, Raised):
                # pytest keeps the error for other tests, so the note must be added only once.
                told = getattr(first.error, "__notes__", ())
                if isinstance(first.error, Deadlock) and ONCE_FOR_ALL not in told:
                    first.error.add_note(ONCE_FOR_ALL)
                return [first, *(self._on_rank(rank, work) for rank, work in enumerate(fill) if rank)]
        try:
            return self._run_bodies(fill, First(), faults=(), sets_up=True)
        except BaseException:
            self._given_up = True
            raise

    def _tell(self) -> None:
        """Report, at the end of a phase, the unread output, the properties and the subtests of the ranks."""
        for one in [one for rank in self._ranks for one in rank.captured]:
            one.show()
        self._record(self._ranks)
        reported = {number: rank.reports[:] for number, rank in enumerate(self._ranks) if rank.reports}
        for rank in self._ranks:
            rank.reports.clear()
        report(self._item, self._case.world_size, reported)

    def _record(self, ranks: list[RankItem]) -> None:
        record(self._item, [rank.take_properties() for rank in ranks])

    def call(self, drawn: dict[str, Any]) -> None:
        """Run the body on every rank; with the marker ``schedules``, under each of its schedules."""
        __tracebackhide__ = True
        if self._is_async:
            _refuse_async()
        self._called = None if self._item.obj is self._plain else self._item.obj
        schedule = next((value for value in drawn.values() if isinstance(value, DrawnSchedule | Replay)), None)
        if schedule is None and runs_under_schedules(self._item):
            if not is_property(self._item):
                self._used, self._aside = False, None
                search_schedules(self._item, self._run_afresh)
                if self._aside is not None:
                    raise self._aside
                return
            schedule = draw_schedule()
        try:
            self._run(drawn, schedule)
        except Exception:
            if schedule is not None and is_property(self._item):
                note_schedule(schedule)
            raise

    def _run(self, drawn: dict[str, Any], schedule: Schedule | None) -> None:
        __tracebackhide__ = True
        verdict(self._outcomes(drawn, schedule))
        self._warn_of_results()

    def _warn_of_results(self) -> None:
        """Warn once for all ranks, with pytest's text, if a body returned a value."""
        returned = next((rank.returned for rank in self._ranks if rank.returned is not None), None)
        if returned is not None:
            warnings.warn(
                pytest.PytestReturnNotNoneWarning(
                    f"Test functions should return None, but {self._item.nodeid} returned {type(returned)!r}.\n"
                    "Did you mean to use `assert` instead of `return`?"
                ),
                stacklevel=1,
            )

    def _outcomes(self, drawn: dict[str, Any], schedule: Schedule | None) -> list[Outcome]:
        __tracebackhide__ = True
        faults = next((value for value in drawn.values() if isinstance(value, DrawnFaults)), None)
        bodies = [partial(self._with_request, *of_rank, drawn) for of_rank in enumerate(self._ranks)]
        try:
            return self._run_bodies(bodies, schedule, faults)
        finally:
            self._tell()
            if is_property(self._item):
                from pdlcheck.harness.reporting.hypothesis_notes import tell

                said = [rank.said[:] for rank in self._ranks]
                for rank in self._ranks:
                    rank.said.clear()
                tell(said)

    def _run_afresh(self, schedule: Schedule) -> BaseException | None:
        """Run the bodies on new ranks with new fixtures, as in a run of only this schedule."""
        if self._used:
            notes = notes_of(self._item)
            self.teardown()
            put_notes(self._item, notes)
            self._stack = ExitStack()
            empty_shared(self._item)
            self.setup()
        self._used = True
        try:
            outcomes = self._outcomes({}, schedule)
        except RankTimeout:  # a timeout ends the search, like Ctrl-C
            raise
        except Exception as error:
            return error
        try:
            verdict(outcomes)
            self._warn_of_results()
        except (KeyboardInterrupt, SystemExit, pytest.exit.Exception):
            raise
        except (pytest.skip.Exception, pytest.xfail.Exception) as aside:
            self._aside = self._aside or aside  # a failure under another schedule takes precedence
        except BaseException as error:
            return error
        return None

    def teardown(self) -> None:
        """Tear down the fixtures of every rank, last rank first."""
        if self._is_async:
            return
        ranks, self._ranks = self._ranks, []
        with self._stack:
            self._stack.callback(release, ranks)
            if self._at_once and not any(rank.has_more() for rank in ranks):
                for rank in reversed(ranks):
                    rank.finish()
                return
            notes = notes_of(self._item)  # tmp_path removes its note at the first rank's teardown
            notes.setdefault(results_key, {})  # a set-up that Ctrl-C ended has no report
            finish = [partial(self._finish, number, rank, notes) for number, rank in enumerate(ranks)]
            ended = self._run_bodies(finish, _LastFirst(), faults=(), keep_groups=True)
            self._record(ranks)
            with suppress(Deadlock) if self._given_up else nullcontext():  # some ranks lack fixtures of others
                verdict(ended)

    def _on_rank(self, rank: int, work: Callable[[], Any]) -> Outcome:
        """Run ``work`` on one rank while the others do nothing."""
        bodies: list[Callable[[], Any]] = [_stand_still] * self._case.world_size
        bodies[rank] = work
        return self._run_bodies(bodies, faults=(), sets_up=True)[rank]

    def _run_bodies(self, *args: Any, **kwargs: Any) -> list[Outcome]:
        """Run the bodies within the item's limit; no limit applies to the teardown of an item whose time is over."""
        __tracebackhide__ = True
        self._world.until = None if self._is_late else deadline(self._item)
        try:
            return self._cluster.run_bodies(*args, **kwargs)
        except RankTimeout:
            self._is_late = True
            raise
        finally:
            self._world.until = None

    def _as_rank(self, rank: int, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the rank, while the rank fixtures describe this rank."""
        context = self._context(rank)
        set_rank_context(context)
        try:
            return work()
        finally:
            leave_rank_context(context)

    def _context(self, rank: int, *, in_body: bool = False, for_all: Callable[[], bool] = lambda: True) -> RankContext:
        group: Any = dist.group.WORLD
        device = torch.device("cuda", rank) if self._own_devices else self._device
        return RankContext(rank, self._case.world_size, device, group, in_body, for_all)

    def _in_phase(self, number: int, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the rank; its fixtures stay its own while it waits for other ranks in one of them."""
        mine = self._ranks[number]
        with in_force(FixturePhase(mine, self._context(number, for_all=mine.is_for_all))):
            return work()

    def _with_request(self, number: int, rank: RankItem, drawn: dict[str, Any]) -> None:
        __tracebackhide__ = True
        if "request" not in self._item.fixturenames:
            self._body(rank, drawn)
            return
        with in_force(FixturePhase(rank, self._context(number, in_body=True))):
            self._body(rank, drawn)

    def _body(self, rank: RankItem, drawn: dict[str, Any]) -> None:
        __tracebackhide__ = True
        body = rank.body
        if hasattr(body, "hypothesis"):
            from pdlcheck.harness.reporting.hypothesis_notes import hear

            instance = getattr(body, "__self__", None)
            body = body.hypothesis.inner_test.__wrapped__
            body = body if instance is None else partial(body, instance)
            with hear(rank.said.append):
                body(**rank.arguments, **own_copy(body, (), drawn, of="the test")[1])
        else:
            rank.returned = (self._called or body)(**rank.arguments)

    def _fill_wide(self) -> None:
        begin_request(self._item)
        self._begin(self._item)
        for definition in _wide(self._item):
            request_of(self._item).getfixturevalue(definition.argname)

    def _begin(self, item: pytest.Function) -> None:
        if item.cls is not None:
            make_instance(item)
        item.funcargs[CASE] = self._case

    def _fill(self, mine: RankItem) -> None:
        item = mine.item
        self._begin(item)
        mine.body = item.obj
        follow_log(item)
        try:
            fill_fixtures(item)
            require_own_values(item)
        finally:
            mine.note_set_up()
        mine.arguments = {name: item.funcargs[name] for name in argument_names(item)}

    def _finish(self, number: int, rank: RankItem, notes: dict[Any, Any]) -> None:
        with in_force(FixturePhase(rank, self._context(number, for_all=rank.is_for_all), notes)):
            rank.finish()


class _LastFirst(First):
    """A schedule like ``First`` that begins with the last rank."""

    def choose(self, point: SwitchPoint) -> int:
        """Choose the current rank, or else the next lower one."""
        if point.kind != "poll" and point.current in point.runnable:
            return point.current
        return next((rank for rank in reversed(point.runnable) if rank < point.current), point.runnable[-1])


def _wide(item: pytest.Function) -> list[Any]:
    """Return the fixtures that the item names and that all ranks share."""
    known = definitions_of(item)
    return [known[name][-1] for name in item.fixturenames if name in known and known[name][-1].scope != "function"]


def _refuse_async() -> None:
    """Fail the test in a frame of its own that is not hidden, because pytest needs at least one visible frame."""
    pytest.fail(_ASYNC, pytrace=False)


def _stand_still() -> None:
    """Do nothing, on the other ranks while one sets up its fixtures."""
