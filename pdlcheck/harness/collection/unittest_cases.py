"""Methods of a ``unittest.TestCase`` on ranks, collected as functions; a fixture does the work of ``TestCase.run``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest import TestCase

import pytest

from pdlcheck.compat.pytest.items import exchange_traceback_filter, make_functions
from pdlcheck.compat.pytest.unittest import TestCaseFunction, UnitTestCase, get_unpacked_marks
from pdlcheck.compat.python.unittest import name_test_method
from pdlcheck.harness.collection.marker_ownership import claims_world_size
from pdlcheck.harness.collection.plugin_fixtures import LIFE

__all__ = ["collected", "live"]


class _RankedTestCase(UnitTestCase):
    """A collector of a test case with marked methods; methods without the marker are collected as by pytest."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        self.add_marker(pytest.mark.usefixtures(LIFE))
        for item in super().collect():
            if isinstance(item, TestCaseFunction) and item.get_closest_marker("world_size"):
                yield from self._ranked(item)
            else:
                yield item

    def _ranked(self, item: TestCaseFunction) -> Iterable[pytest.Item]:
        method = getattr(self.obj, item.name)
        for ranked in make_functions(self, item.name, _as_called(method)):
            if any(getattr(one, "__unittest_expecting_failure__", False) for one in (method, self.obj)):
                ranked.add_marker(pytest.mark.xfail(reason="unittest.expectedFailure", strict=True))
            exchange_traceback_filter(ranked, partial(partial, _without_unittest))
            yield ranked


def collected(collector: pytest.Module | pytest.Class, name: str, obj: type) -> pytest.Collector | None:
    """Return the collector of a ``TestCase`` if some of its methods run on ranks; otherwise None."""
    if not issubclass(obj, TestCase) or inspect.isabstract(obj):
        return None
    marked = collector.get_closest_marker("world_size") or any(map(_is_marked, (obj, *_methods(obj))))
    ours = marked and claims_world_size(collector)
    return _RankedTestCase.from_parent(collector, name=name, obj=obj) if ours else None


def live(request: pytest.FixtureRequest) -> Generator[None]:
    """Run ``setUp`` after all other fixtures, then the method, ``tearDown`` and the clean-ups."""
    item = request.node
    if isinstance(item, TestCaseFunction):  # pytest runs it as usual
        yield
        return
    case, method = request.instance, request.function
    if getattr(method, "__unittest_skip__", False):
        pytest.skip(method.__unittest_skip_why__)
    for other in request.fixturenames:
        if other != LIFE:
            request.getfixturevalue(other)
    name_test_method(case, method)
    with ExitStack() as clean_ups:
        case.addCleanup, case.doCleanups = clean_ups.callback, clean_ups.close
        case.subTest = lambda msg=None, **parameters: _subtest(request, msg, parameters)
        case.setUp()
        try:
            yield
        finally:
            case.tearDown()


def _as_called(method: Any) -> Callable[..., None]:
    """Return a stand-in for a method while pytest looks up its arguments, without the function that a decorator wraps.

    unittest does not look at wrapped functions either.
    """

    def stand_in() -> None: ...

    vars(stand_in).update(vars(method))
    vars(stand_in).pop("__wrapped__", None)
    stand_in.__name__, stand_in.__module__ = method.__name__, method.__module__
    stand_in.__signature__ = inspect.signature(method, follow_wrapped=False)  # type: ignore[attr-defined]
    return stand_in


def _without_unittest(filtered: Callable[[Any], Any], excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
    """Return the frames without those of ``assertEqual`` and similar methods, as pytest does for a ``TestCase``."""
    traceback = filtered(excinfo)
    return traceback.filter(lambda entry: not entry.frame.f_globals.get("__unittest")) or traceback


def _subtest(
    request: pytest.FixtureRequest, msg: str | None, parameters: dict[str, Any]
) -> AbstractContextManager[Any]:
    try:
        subtests = request.getfixturevalue("subtests")
    except pytest.FixtureLookupError:  # pytest < 9 without pytest-subtests
        return nullcontext()
    return subtests.test(msg=msg, **parameters)  # type: ignore[no-any-return]


def _methods(obj: type) -> Iterable[object]:
    return (value for base in obj.__mro__ for value in vars(base).values() if inspect.isfunction(value))


def _is_marked(obj: object) -> bool:
    return any(mark.name == "world_size" for mark in get_unpacked_marks(obj))
