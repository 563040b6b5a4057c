"""pytest's definitions of fixtures: which a test uses, what they hold, and how they are registered."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest

from pdlcheck.compat.private import take, uses

__all__ = [
    "all_definitions",
    "argument_names",
    "copy_definition",
    "definitions_of",
    "drop_dependents",
    "drop_finalizers",
    "each_function_scoped",
    "find_definitions",
    "is_direct_parameter",
    "name_of_xunit",
    "register",
    "repeated_definitions",
    "sort_definitions",
]

_XUNIT = r"_(?:xunit|unittest)_(setup_module|setup_class|setUpClass)_fixture"  # pytest's names for these
_FUNCTION = take(
    "_pytest.scope.Scope.Function", "a scope for fixtures that each rank sets up", lost="a cause of --world"
)


@uses("_pytest.python.Function._fixtureinfo", lost="which fixtures a test uses; tests do not run on ranks")
def definitions_of(item: Any) -> Mapping[str, Sequence[Any]]:
    """Return the definitions of each fixture that a test uses, by name; none for an item without fixtures."""
    info = getattr(item, "_fixtureinfo", None)
    return {} if info is None else info.name2fixturedefs


def argument_names(item: Any) -> tuple[str, ...]:
    """Return the names of the fixtures that a test function takes as arguments."""
    return item._fixtureinfo.argnames  # type: ignore[no-any-return]


@uses("_pytest.python.Metafunc._arg2fixturedefs", lost="the fixtures of a test before it is repeated on worlds")
def repeated_definitions(metafunc: pytest.Metafunc) -> dict[str, Sequence[Any]]:
    """Return the definitions that a test will use, by name, while it is repeated; changes apply to the test."""
    return metafunc._arg2fixturedefs


@uses(
    "_pytest.main.Session._fixturemanager",
    "_pytest.fixtures.FixtureManager._arg2node2fixturedefs or _pytest.fixtures.FixtureManager._arg2fixturedefs",
    lost="the precedence of another plugin's fixture of the same name",
)
def sort_definitions(session: pytest.Session, names: Collection[str], comes_last: Callable[[Any], bool]) -> None:
    """Let pytest prefer other fixtures of these names to those that ``comes_last`` accepts."""
    manager: Any = session._fixturemanager
    for name in names:
        if (by_name := getattr(manager, "_arg2fixturedefs", None)) is not None:  # pytest < 9.1
            # The sort is stable, and pytest uses the last definition.
            by_name.get(name, []).sort(key=lambda definition: not comes_last(definition))
        elif (by_node := getattr(manager, "_arg2node2fixturedefs", None)) is not None:
            for definitions in by_node.get(name, {}).values():
                definitions.sort(key=comes_last)  # pytest uses the first


@uses("_pytest.fixtures.FixtureManager._register_fixture", lost="classes that derive from a DistributedFixture")
def register(collector: Any, name: str, function: Callable[..., object]) -> None:
    """Register a function as a fixture of function scope for the tests of a collector."""
    manager = collector.session._fixturemanager
    manager._register_fixture(name=name, func=function, nodeid=collector.nodeid, scope="function")


@uses(
    "_pytest.fixtures.FixtureManager._get_all_fixture_defs or _pytest.fixtures.FixtureManager._arg2fixturedefs",
    lost="the next set-up of a fixture that a rank did not finish",
)
def all_definitions(session: pytest.Session) -> list[Any]:
    """Return the definitions of all fixtures of the session."""
    manager: Any = session._fixturemanager
    if hasattr(manager, "_get_all_fixture_defs"):
        return list(manager._get_all_fixture_defs())
    return list(chain.from_iterable(manager._arg2fixturedefs.values()))  # before pytest 9


@uses("_pytest.fixtures.FixtureManager.getfixturedefs", lost="fixtures that a simulated rank requests by name")
def find_definitions(item: pytest.Item, name: str) -> Sequence[Any]:
    """Return the definitions of a fixture that a test may request; none if there is no such fixture."""
    return item.session._fixturemanager.getfixturedefs(name, item) or ()


@uses("_pytest.fixtures.FixtureDef._finalizers", lost="fixtures of each simulated rank's own")
def copy_definition(definition: Any) -> Any:
    """Return a copy of a fixture's definition, which is not set up."""
    copied = object.__new__(type(definition))  # half the time of copy.copy
    vars(copied).update(vars(definition))
    copied.cached_result = None
    copied._finalizers = []
    return copied


def drop_dependents(definition: Any, ended: Container[Any]) -> None:
    """Remove the last finalizers of a fixture that finish other fixtures, if those have ended.

    pytest keeps them as long as the fixture, and everything that the other fixtures refer to.
    """
    finalizers = definition._finalizers
    while finalizers and getattr(getattr(finalizers[-1], "func", None), "__self__", None) in ended:
        finalizers.pop()


def drop_finalizers(definition: Any) -> None:
    """Remove the finalizers of a fixture whose set-up was abandoned, so that it can be set up again."""
    definition._finalizers.clear()


@contextmanager
@uses("_pytest.fixtures.FixtureDef._scope", lost="the search for a shared fixture that makes worlds differ")
def each_function_scoped(definitions: Sequence[Any]) -> Iterator[None]:
    """Give fixtures function scope in the block, so that each rank sets them up."""
    before = [one._scope for one in definitions]
    try:
        for one in definitions:
            one._scope = _FUNCTION
        yield
    finally:
        for one, scope in zip(definitions, before, strict=True):
            one._scope = scope


def is_direct_parameter(definition: Any) -> bool:
    """Return whether a definition stands for a value that ``parametrize`` passes unchanged."""
    return bool(definition.func.__module__ == "_pytest.python")


def name_of_xunit(argname: str) -> str | None:
    """Return the name of the user's function behind a fixture that pytest makes of ``setup_module`` or similar."""
    found = re.match(_XUNIT, argname)
    return None if found is None else found[1]
