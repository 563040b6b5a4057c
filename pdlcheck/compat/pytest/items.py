"""What pytest keeps in a test item: its request, its body, its report sections and its notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from pdlcheck.compat.private import take, uses

__all__ = [
    "begin_request",
    "catch_warnings_for_item",
    "drop_request",
    "exchange_traceback_filter",
    "fill_fixtures",
    "has_request",
    "make_functions",
    "make_instance",
    "notes_of",
    "put_notes",
    "report_sections",
    "request_of",
    "results_key",
    "runtestprotocol",
    "set_up_state",
    "show_at_item",
    "skip_at_item",
]

catch_warnings_for_item = take(
    "_pytest.warnings.catch_warnings_for_item", "the warnings of a test on a rank", lost="tests on rank processes"
)
results_key = take(
    "_pytest.tmpdir.tmppath_result_key", "the results that decide whether tmp_path is kept", lost="tests on ranks"
)
runtestprotocol = take(
    "_pytest.runner.runtestprotocol", "another run of a test whose worlds differ", lost="the cause of a difference"
)


@uses("_pytest.python.Function._request", lost="tests on ranks")
def request_of(item: pytest.Function) -> Any:
    """Return the request of a test."""
    return item._request


def has_request(item: pytest.Function) -> bool:
    """Return whether a test has a request: it has not ended."""
    return bool(getattr(item, "_request", None))


def drop_request(item: pytest.Function) -> None:
    """Drop the request of a test, as pytest does when the test has ended."""
    item._request = False  # type: ignore[assignment]  # as pytest does


@uses("_pytest.python.Function._initrequest", lost="tests on ranks")
def begin_request(item: pytest.Function) -> None:
    """Give a test a new request and new arguments, before its fixtures are set up."""
    item._initrequest()


@uses("_pytest.fixtures.TopRequest._fillfixtures", lost="tests on simulated ranks")
def fill_fixtures(item: pytest.Function) -> None:
    """Set up the fixtures that a test names."""
    __tracebackhide__ = True
    item._request._fillfixtures()


@uses("_pytest.python.Function._instance", lost="methods on simulated ranks")
def make_instance(item: pytest.Function) -> None:
    """Give a method a new instance of its class."""
    __tracebackhide__ = True
    item._instance = item.parent.newinstance()  # type: ignore[union-attr]  # a Class
    item.obj = getattr(item._instance, item.originalname)


@uses("_pytest.nodes.Item._report_sections", lost="report sections that a test adds on a rank process")
def report_sections(item: pytest.Item) -> list[tuple[str, str, str]]:
    """Return the sections that a test has added to its report."""
    return item._report_sections


@uses("_pytest.python.Function._traceback_filter", lost="short tracebacks of unittest methods on ranks")
def exchange_traceback_filter(item: Any, make: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
    """Replace the filter of a test's tracebacks by what ``make`` returns for it."""
    item._traceback_filter = make(item._traceback_filter)


@uses("_pytest.python.PyCollector._genfunctions", lost="unittest methods on ranks")
def make_functions(collector: Any, name: str, function: Callable[..., Any]) -> Iterable[pytest.Item]:
    """Return the items that pytest makes of one function of a collector."""
    return collector._genfunctions(name, function)  # type: ignore[no-any-return]


@uses("_pytest.stash.Stash._storage", lost="another run of a simulated test under the marker schedules")
def notes_of(item: pytest.Item) -> dict[Any, Any]:
    """Return a copy of everything in the stash of a test."""
    return dict(item.stash._storage)


def put_notes(item: pytest.Item, notes: Mapping[Any, Any]) -> None:
    """Add notes to the stash of a test."""
    item.stash._storage.update(notes)


@uses("_pytest.main.Session._setupstate", lost="tests on rank processes")
def set_up_state(session: pytest.Session) -> Any:
    """Return the record of what is set up in a session, with ``stack`` and ``teardown_exact``."""
    return session._setupstate


@uses("_pytest.outcomes.Skipped._use_item_location", lost="the line of a test in the report of its skip")
def show_at_item(skip: Any) -> None:
    """Let the report of a skip name the line of the test."""
    skip._use_item_location = True


def skip_at_item(reason: str) -> BaseException:
    """Return a skip whose report names the line of the test."""
    return pytest.skip.Exception(reason, _use_item_location=True)
