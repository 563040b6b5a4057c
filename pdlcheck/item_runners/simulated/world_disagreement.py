"""Tests whose verdicts differ between ``sim`` and processes, because simulated ranks may share module globals.

At the end of the session, each such test runs again on simulated ranks, with separate module globals for each rank. The
finding is added to the report of the failure. In a session whose verdicts agree, nothing is done, except that the
user's modules are examined once, after collection.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.compat.pytest.items import runtestprotocol
from pdlcheck.harness.collection import cases
from pdlcheck.harness.running import worlds
from pdlcheck.harness.running.skips import MISSING

if TYPE_CHECKING:
    from pdlcheck.worlds.simulated.module_globals.cause import Finding, Separate
    from pdlcheck.worlds.simulated.module_globals.run import UserState

__all__ = ["Differing", "compares_worlds"]

_AT_MOST = 10  # the greatest number of tests that run again
SECTION = "worlds differ"
_NO_GLOBALS = ", and not because simulated ranks share globals of your modules{}, as far as those can be told apart."
_NO_PACKAGES = (
    "Those of installed packages were not looked at: where one keeps its rank or its groups in a module, "
    "pdlcheck_own_globals = its.module, in an ini file, gives each rank its own."
)
_SENT = (
    ": functions, what they enclose, and results are sent to and from processes, simulated ranks have them as they are."
)
_OF_THE_CALLER = (
    "What the caller of world.run sets in a module, processes do not see: set it in the function that the ranks run, "
    "or let the body of the test run on ranks, by the marker world_size, where monkeypatch is each rank's own."
)
_ONE_FOR_ALL = (
    "On processes let rank 0 make what all ranks are to have and broadcast it, or let each make the same from a seed; "
    "shared_tmp_path is the same folder on every rank."
)


def compares_worlds(config: pytest.Config) -> bool:
    """Return whether this process receives the verdicts of ``sim`` and of processes, and no debugger is in use."""
    names = cases.world_names(config)
    debugging = config.getoption("--pdl-rank-pdb") is not None or config.getoption("usepdb", False)
    alone = not hasattr(config, "workerinput") and not config.getoption("numprocesses", None)
    return "sim" in names and len(set(names)) > 1 and alone and not debugging and not cases.runs_in_a_rank(config)


@dataclass
class _Verdict:
    item: pytest.Item
    failure: pytest.TestReport | None = None
    passed: bool = False


@dataclass(eq=False)  # pytest keeps its plugins in sets, so they must be hashable
class Differing:
    """A plugin of the session that records the verdict of each test in each world."""

    config: pytest.Config
    start: UserState | None = None
    _refused: str = ""
    _around_call: Separate = nullcontext
    _items: dict[str, pytest.Item] = field(default_factory=dict)
    _verdicts: dict[object, dict[str, _Verdict]] = field(default_factory=dict)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Examine the user's modules before the first test runs."""
        self._items = {item.nodeid: item for item in session.items if cases.world_of(item) is not None}
        if self._items and not session.config.getoption("collectonly"):
            from pdlcheck.worlds.simulated.module_globals.run import UserState

            try:
                self.start = UserState()
            except Exception as error:  # some object of the user's cannot be examined
                self._refused = f"{type(error).__name__}: {error}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the verdict of a test."""
        item = self._items.get(report.nodeid)
        world = None if item is None else cases.world_of(item)
        if item is None or world is None:
            return
        verdict = self._verdicts.setdefault(_without_world(item), {}).setdefault(world, _Verdict(item))
        if hasattr(report, MISSING):
            return
        if report.failed:
            verdict.failure = verdict.failure or report
        elif report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            verdict.passed = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Explain the verdicts that differ."""
        if exitstatus != pytest.ExitCode.TESTS_FAILED:  # the session was stopped, so it must end now
            return
        number = 0
        for verdicts in self._verdicts.values():
            on_sim = verdicts.pop("sim", None)
            for world, on_real in verdicts.items():
                if on_sim is None or not _differ(on_sim, on_real):
                    continue
                number += 1
                self._explain(on_sim, on_real, world, once_more=number <= _AT_MOST)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Run the body inside of the block that separates the ranks' globals."""
        with self._around_call():
            return (yield)

    def _run_again(self, item: pytest.Item, separate: Separate) -> str | None:
        """Run an item again; return the first line of its failure, or None if it passes.

        Ranks set up their fixtures one after another, and fixtures of wider scope once for all ranks, so set-ups share
        globals.
        """
        in_ranks = cases.case_of(item) is not None
        self._around_call = separate if in_ranks else nullcontext
        try:
            with nullcontext() if in_ranks else separate():
                reports = runtestprotocol(item, log=False, nextitem=None)
        finally:
            self._around_call = nullcontext
        return next((_first_line(report) for report in reports if report.failed), None)

    def _run_with(self, item: pytest.Item, names: Sequence[str]) -> str | None:
        """Run an item again with separate modules for each rank, also while fixtures of ranks are set up."""
        world: Any = worlds.open_world(self.config, "sim")
        given = world.own_globals
        world.own_globals = (*given, *(name for name in names if name not in given))
        try:
            return self._run_again(item, nullcontext)
        finally:
            world.own_globals = given

    def _explain(self, on_sim: _Verdict, on_real: _Verdict, world: str, *, once_more: bool) -> None:
        from pdlcheck.item_runners.simulated.frameworks import modules_of_framework
        from pdlcheck.worlds.simulated.module_globals.cause import Finding, find_cause, find_modules
        from pdlcheck.worlds.simulated.module_globals.mutable_state import user_modules
        from pdlcheck.worlds.simulated.observers.set_order import take_found

        failed = on_real.failure is not None
        how = f"passes on sim, fails on {world}" if failed else f"fails on sim, passes on {world}"
        if on_real.failure is not None and " cannot be sent to the " in _first_line(on_real.failure):
            on_real.failure.sections.append((SECTION, how + _SENT))
            return
        if on_sim.failure is not None and _says_why(on_sim.failure):
            return
        again, with_own = partial(self._run_again, on_sim.item), partial(self._run_with, on_sim.item)
        modules = [name for name in user_modules() if name not in ("__main__", "__mp_main__")]

        def as_on_processes(message: str | None) -> bool:
            return (message is not None) == failed

        finding = Finding("unknown", like=self._refused or f"{_AT_MOST} tests before it ran again, and no more do")
        fixtures: list[str] = []
        take_found()
        try:
            if once_more and self.start is not None:
                with _undisturbed(self.config):
                    finding = find_cause(again, as_on_processes, self.start)
                    with suppress(Exception):  # as below; the findings so far remain valid
                        if finding.cause == "other" and not failed:  # try first the framework whose own check failed
                            framework = modules_of_framework(on_sim.failure)
                            finding = find_modules(finding, with_own, as_on_processes, self.start, framework)
                        finding = find_modules(finding, with_own, as_on_processes, self.start, modules)
                    if finding.cause == "other" and cases.case_of(on_sim.item) is not None:
                        fixtures = self._try_fixtures(on_sim.item, on_real)
        except Exception as error:  # the user's objects may not support this; the report is complete without it
            finding = Finding("unknown", like=f"{type(error).__name__}: {error}")
        report = on_real.failure or on_sim.failure
        assert report is not None
        words = [f"{how}{fixtures[0]}", *fixtures[1:]] if fixtures else _words(finding, how, failed, take_found())
        report.sections.append((SECTION, "\n".join(words)))

    def _try_fixtures(self, item: pytest.Item, on_real: _Verdict) -> list[str]:
        """Return the explanation if fixtures are the cause, or may be."""
        from pdlcheck.item_runners.simulated.shared_fixtures import blame, of_users, told, used_before

        wide, failure = of_users(item), on_real.failure
        expected = None if failure is None else _first_line(failure)
        blamed, like = blame(wide, partial(self._run_again, item, nullcontext), expected)
        if blamed:
            each = "one of its own" if len(blamed) == 1 else "some of its own"
            return [
                ": simulated ranks share fixtures of wider than function scope, each process sets up its own.",
                f"With {each} for each rank it {f'fails on sim too: {like}' if failure else 'passes on sim too'}",
                *(f"  {line}" for line in told(blamed)),
                _ONE_FOR_ALL if failure else "A fixture of function scope is each rank's own in every world.",
            ]
        if before := used_before(item, wide):
            return [
                ": simulated ranks share fixtures of wider than function scope that tests before it have used, too.",
                "Whether that is the reason was not found out, as a test runs again without those before it.",
                *(f"  {line}" for line in told(before)),
            ]
        return [_NO_GLOBALS.format(" or fixtures of wider scope"), _NO_PACKAGES] if wide else []


def _differ(one: _Verdict, other: _Verdict) -> bool:
    """Return whether one passed and the other failed; a skip or an expected failure is no difference."""
    return (one.failure is None) != (other.failure is None) and (one if one.failure is None else other).passed


def _without_world(item: pytest.Item) -> object:
    """Return a key for the test that is the same in every world."""
    case, world = cases.case_of(item), cases.world_of(item)
    parts = item.callspec.id.split("-")  # type: ignore[attr-defined]
    if world in parts:  # a hook of the user's may have made other ids
        parts.remove(world)
    return item.nodeid.split("[")[0], tuple(parts), None if case is None else case.world_size


@contextmanager
def _undisturbed(config: pytest.Config) -> Iterator[None]:
    """Keep the pictures and the warnings of a test's own run while it runs again."""
    timeline, config.option.pdl_timeline = config.option.pdl_timeline, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        config.option.pdl_timeline = timeline


def _first_line(report: pytest.TestReport) -> str:
    """Return the first line of a failure's message."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return (str(getattr(crash, "message", report.longrepr)).splitlines() or [""])[0]


def _says_why(on_sim: pytest.TestReport) -> bool:
    """Return whether the failure itself explains why it happens only on simulated ranks."""
    from pdlcheck.worlds.simulated.c10d.foreign_groups import SHARE_ATTRIBUTE
    from pdlcheck.worlds.simulated.scheduling.scheduler import ARE_THREADS

    return any(words in on_sim.longreprtext for words in (ARE_THREADS, SHARE_ATTRIBUTE))


def _words(finding: Finding, how: str, failed: bool, loops: Sequence[str]) -> list[str]:
    from pdlcheck.worlds.simulated.module_globals.cause import told

    match finding.cause:
        case "globals":
            end = f"fails on sim too: {finding.like}" if failed else "passes on sim too"
            of_caller = [_OF_THE_CALLER] if finding.by_the_caller else []
            own = [" ".join(finding.modules)] if finding.modules else []
            together = [] if finding.alone else ["It takes them together."]
            return [
                f"{how}: simulated ranks share {finding.shared}.",
                f"With globals of its own for each rank it {end}",
                *(f"  {line}" for line in told(finding)),
                *together,
                *of_caller,
                *(f"pdlcheck_own_globals = {name}, in an ini file, makes it so in every run." for name in own),
            ]
        case "before":
            end = "fails" if failed else "passes"
            return [f"{how}; but {end} on sim too when it runs alone: a test before it has changed what it uses."]
        case "unknown":
            return [f"{how}; whether that comes from module globals was not found out: {finding.like}"]
    from pdlcheck.worlds.simulated.module_globals.import_time_reads import early_reads

    if reads := early_reads():
        return [
            f"{how}. What modules make of a launcher's variables when they are imported,",
            "simulated ranks share as the controller made it, where no rank is set; each process makes its own:",
            *(f"  {one}" for one in reads),
            "Read in a function, they are each rank's own in every world.",
        ]
    if loops and failed:
        return [
            how + _NO_GLOBALS.format(""),
            "Simulated ranks share the order of a set; each process has its own. Loop over sorted(...) or a list:",
            *(f"  {one}" for one in loops),
        ]
    imported = "What an import draws from torch, numpy or random, unseeded, is one on sim; each process draws its own."
    return [
        how + _NO_GLOBALS.format(""),
        _NO_PACKAGES,
        *([imported] if failed else []),
    ]
