"""Fixtures of wider than function scope: simulated ranks share one value, each process has its own.

An experiment decides whether this makes two worlds differ, as with globals: the test runs again, and each simulated
rank sets up these fixtures for itself.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import pytest

from pdlcheck.compat.pytest.fixtures import definitions_of, each_function_scoped, name_of_xunit
from pdlcheck.harness.collection import cases
from pdlcheck.worlds.observe.callsite import short
from pdlcheck.worlds.simulated.module_globals.mutable_state import user_modules

__all__ = ["blame", "of_users", "told", "used_before"]

_AT_MOST = 12  # the greatest number of fixtures that are tried one at a time


def of_users(item: pytest.Item) -> list[Any]:
    """Return the definitions of the user's fixtures of wider scope that an item uses, directly or through others."""
    modules = user_modules()
    return [
        one
        for one in chain.from_iterable(definitions_of(item).values())
        if one.scope != "function" and (one.func.__module__ in modules or name_of_xunit(one.argname))
    ]


def used_before(item: pytest.Item, definitions: Iterable[Any]) -> list[Any]:
    """Return the definitions that earlier tests on the same ranks have used."""
    items = item.session.items
    before = [one for one in items[: items.index(item)] if cases.case_of(one) == cases.case_of(item)]
    used = {id(definition) for one in before for definition in of_users(one)}
    return [one for one in definitions if id(one) in used]


def blame(definitions: Sequence[Any], run: Callable[[], str | None], failure: str | None) -> tuple[list[Any], str]:
    """Return the fixtures that make a test end differently on processes, and the failure without sharing them.

    Args:
        definitions: definitions of the fixtures.
        run: runs the test on sim and returns the first line of its failure, None if it passes.
        failure: the first line of the failure on processes. A run that fails differently proves nothing: two ranks of
            one process may be unable to set up what each process can.
    """

    def ends_alike(some: Sequence[Any]) -> bool:
        with each_function_scoped(some):
            said = run()
        like.append(said or "")
        return _kind(said) == _kind(failure)

    like: list[str] = []
    if not definitions or not ends_alike(definitions):
        return [], ""
    of_all = like[0]
    for one in definitions[:_AT_MOST] if len(definitions) > 1 else ():
        if ends_alike([one]):
            return [one], like[-1]
    return [*definitions], of_all


def told(definitions: Iterable[Any]) -> list[str]:
    """Return a line for each definition, with its name, scope and place."""
    lines = []
    for one in definitions:
        own = name_of_xunit(one.argname)
        code = None if own else getattr(inspect.unwrap(one.func), "__code__", None)
        place = "" if code is None else f", {short(code.co_filename)}:{code.co_firstlineno}"
        lines.append(f"{own or one.argname}  scope {one.scope}{place}")
    return lines


def _kind(message: str | None) -> str | None:
    """Return the name of a failure's exception, or the word ``assert``."""
    found = None if message is None else re.match(r"[\w.]*", message)
    return None if found is None else found[0].rpartition(".")[2]
