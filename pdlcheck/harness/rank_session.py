"""The pytest session that a rank process keeps: made on first use, it collects a file when an item of it comes.

The controller sends the phases of an item (``setup``, ``call``, ``teardown``) in as few messages as will do; a failure
travels back as the exception itself with the report that pytest renders here, where the source and the values are.
"""

from __future__ import annotations

import io
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from _pytest.config import _prepareconfig, apply_warning_filters
from _pytest.outcomes import OutcomeException

from pdlcheck.harness.cases import IN_RANK, RankContext, set_rank_context
from pdlcheck.harness.examples import is_property
from pdlcheck.harness.reports import RANK_REPORT

__all__ = ["SessionDescription", "call", "describe", "run", "setup", "teardown"]

# options of the controller alone: what it distributes, measures, remembers or asks
_NOT_IN_RANKS = ("cov", "dist", "failedfirst", "lf", "newfirst", "no_cov", "numprocesses", "tx", "usepdb", "xmlpath")


_described = pytest.StashKey[bytes]()


@dataclass(frozen=True)
class SessionDescription:
    """What a rank needs to make the same session as the controller's."""

    arguments: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    filters: tuple[Sequence[str], Sequence[str]]  # of warnings: from the ini file, from the command line


def describe(config: pytest.Config) -> bytes:
    """The controller's session, for the ranks: a pickled :class:`SessionDescription`, the same for every item."""
    if _described not in config.stash:
        config.stash[_described] = pickle.dumps(_description(config))
    return config.stash[_described]


def _description(config: pytest.Config) -> SessionDescription:
    arguments = ["-s", "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    arguments += ["--rootdir", str(config.rootpath), "-o", "addopts="]
    # filters are for tests: pytest itself warns of modules that the fork server imported before it
    arguments += ["-o", "filterwarnings=ignore"]
    if config.getoption("noconftest"):
        arguments.append("--noconftest")
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    for plugin in config.getoption("plugins") or []:
        arguments += ["-p", plugin]
    options = tuple(
        (name, value)
        for name, value in sorted(vars(config.option).items())
        if isinstance(value, str | int | float | bool | None | list) and not name.startswith(_NOT_IN_RANKS)
    )
    filters = (config.getini("filterwarnings"), config.known_args_namespace.pythonwarnings or [])
    return SessionDescription(tuple(arguments), options, filters)


class _RankSession:
    """One pytest configuration and session; items by node id."""

    def __init__(self, description: SessionDescription) -> None:
        os.environ.pop("PYTEST_ADDOPTS", None)
        self.filters = description.filters
        self.config = _prepareconfig(list(description.arguments))
        self.config.stash[IN_RANK] = True
        own = {"capture", "inifilename", "override_ini", "plugins", "rootdir", "file_or_dir"}
        for name, value in description.options:
            if name not in own and hasattr(self.config.option, name):
                setattr(self.config.option, name, value)
        self.config._do_configure()
        self.session = pytest.Session.from_config(self.config)
        self.config.hook.pytest_sessionstart(session=self.session)
        self.items: dict[str, pytest.Function] = {}
        self.teardown_error: BaseException | None = None  # until the controller asks for that phase

    def item(self, path: str, nodeid: str) -> pytest.Function:
        if nodeid not in self.items:
            self.session.testsfailed = 0
            for item in self.session.perform_collect([path]):
                assert isinstance(item, pytest.Function)
                self.items[item.nodeid] = item
        if nodeid not in self.items:
            raise LookupError(f"a rank collected {path} and found no {nodeid}; do test ids differ from run to run?")
        return self.items[nodeid]


_session: _RankSession | None = None


def setup(description: bytes, path: str, nodeid: str) -> None:
    """Collect the item if need be, and set its fixtures up in this rank; ``description`` is what ``describe`` made."""
    global _session
    if _session is None:
        _session = _RankSession(pickle.loads(description))
    item = _session.item(path, nodeid)
    set_rank_context(
        RankContext(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), dist.group.WORLD)  # type: ignore[arg-type]
    )
    _session.session._setupstate.teardown_exact(item)  # what the item before needed and this one does not
    if not getattr(item, "_request", None):
        item._initrequest()
    _phase(item, "setup", lambda: item.ihook.pytest_runtest_setup(item=item))


def run(description: bytes, path: str, nodeid: str) -> bool:
    """All phases in one message, for an item of which nothing but our own fixtures is set up."""
    setup(description, path, nodeid)
    return call(nodeid, {})


def call(nodeid: str, drawn: dict[str, Any]) -> bool:
    """Run the item's body in this rank; ``drawn`` are the arguments of one example of a property.

    A body that returned is followed by its tear-down at once, without a message in between. The result tells whether
    that was done; where it failed, :func:`teardown` raises its error.
    """
    assert _session is not None
    item = _session.items[nodeid]
    if not is_property(item):
        _phase(item, "call", lambda: item.ihook.pytest_runtest_call(item=item))
        try:
            _tear_down(item)
        except (Exception, OutcomeException) as error:  # belongs to another phase than this one
            _session.teardown_error = error
            return False
        return True
    body = item.obj.hypothesis.inner_test
    instance = getattr(item.obj, "__self__", None)
    fixtures = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    _phase(item, "call", lambda: body(*([] if instance is None else [instance]), **fixtures, **drawn))
    return False


def teardown(nodeid: str) -> None:
    """Tear the item's own fixtures down; those of wider scope stay until an item does not need them."""
    item = _session.items.get(nodeid) if _session is not None else None
    if _session is None or item is None:  # its set-up failed before it was collected
        return
    error, _session.teardown_error = _session.teardown_error, None
    if error is not None:
        raise error
    if item._request:  # else it has ended in its call
        _tear_down(item)


def _tear_down(item: pytest.Function) -> None:
    _phase(item, "teardown", lambda: item.ihook.pytest_runtest_teardown(item=item, nextitem=_Sibling(item)))
    item._request = False  # type: ignore[assignment]  # as pytest does when an item has ended
    set_rank_context(None)


class _Sibling:
    """An item in the same place as another, as far as pytest asks."""

    def __init__(self, item: pytest.Item) -> None:
        self._chain = item.listchain()[:-1]

    def listchain(self) -> list[Any]:
        return self._chain


def _phase(item: pytest.Function, when: Literal["setup", "call", "teardown"], run: Callable[[], object]) -> None:
    """Run one phase as pytest does: with the session's warning filters, and a report that plugins see."""
    output = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(output), redirect_stderr(output):
        assert _session is not None
        apply_warning_filters(*_session.filters)
        call = pytest.CallInfo.from_call(run, when=when, reraise=(KeyboardInterrupt,))
        if call.excinfo is not None and isinstance(call.excinfo.value, MemoryError):
            traceback.clear_frames(call.excinfo.tb)  # what the test hoarded, to have room for the report
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    if call.excinfo is None:
        return
    error = call.excinfo.value
    if not isinstance(error, pytest.skip.Exception | pytest.xfail.Exception):
        rendered = str(report.longrepr)
        if output.getvalue():
            rendered += f"\n----- captured output of this rank -----\n{output.getvalue()}"
        setattr(error, RANK_REPORT, rendered)
    raise error
