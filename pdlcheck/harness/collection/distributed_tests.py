"""Classes that derive from a ``DistributedTest`` or a ``DistributedFixture``, as in DeepSpeed's suite.

Such a base class starts processes when it is called with pytest's ``request``, and calls ``run`` in them. This module
recognizes it by its shape: its name, a ``world_size``, ``run`` and ``__call__``. In a session that names worlds with
``--world``, its ``__call__`` runs on those worlds instead. Fixtures are set up once, in the controller, as under the
original base class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdlcheck.compat.pytest import fixtures
from pdlcheck.harness.collection.cases import runs_in_a_rank

__all__ = ["collect", "is_distributed_test"]

_OURS = "_pdlcheck_runs_on_worlds"
_TEST, _FIXTURE = "DistributedTest", "DistributedFixture"


def is_distributed_test(cls: Any) -> bool:
    """Return whether this class derives from a ``DistributedTest`` that runs on the worlds of the session."""
    return any(hasattr(vars(base).get("__call__"), _OURS) for base in _bases(cls, _TEST))


def collect(
    collector: pytest.Collector, name: str, obj: type, run: Callable[[Any, pytest.FixtureRequest], None]
) -> None:
    """Let the launchers among a collected class's bases run it on worlds, and register a ``DistributedFixture``.

    Args:
        collector: the collector of the class.
        name: the name of the class in its module.
        obj: the class.
        run: what runs an instance of such a class on a world.
    """
    if runs_in_a_rank(collector.config):
        return
    if tests := [*_bases(obj, _TEST)]:
        _mark(obj)
    if makers := [*_bases(obj, _FIXTURE)]:
        _register(collector, name, obj)
    for base in (*tests, *makers):
        _exchange(base, run)


def _bases(cls: Any, name: str) -> Iterator[type]:
    """Yield the classes in the inheritance of ``cls`` that start ranks, if one of its bases has this name."""
    mro = cls.__mro__ if issubclass(type(cls), type) else ()
    if not any(base.__name__ == name and _launches(base) for base in mro[1:]):
        return
    yield from (base for base in mro if "__call__" in vars(base) and _launches(base))


def _launches(base: Any) -> bool:
    call = inspect.getattr_static(base, "__call__", None)
    shape = hasattr(base, "world_size") and callable(getattr(base, "run", None)) and inspect.isfunction(call)
    return shape and (hasattr(call, _OURS) or [*inspect.signature(call).parameters][1:] == ["request"])


def _exchange(base: Any, run: Callable[[Any, pytest.FixtureRequest], None]) -> None:
    """Replace ``__call__`` of a class, so that calls run on a world."""
    if not hasattr(vars(base)["__call__"], _OURS):

        def run_on_world(self: Any, request: pytest.FixtureRequest) -> None:
            __tracebackhide__ = True
            run(self, request)

        setattr(run_on_world, _OURS, True)
        base.__call__ = run_on_world


def _mark(cls: Any) -> None:
    """Let the tests of a class use the fixture ``world``, so that they run once on each world."""
    own = vars(cls).get("pytestmark", [])
    own = list(own) if isinstance(own, list | tuple) else [own]
    if not any(mark.name == "usefixtures" and "world" in mark.args for mark in own):
        cls.pytestmark = [*own, pytest.mark.usefixtures("world")]


def _register(collector: Any, name: str, cls: Any) -> None:
    """Register a class as a fixture, as pytest itself did up to 8.3, where a class could declare itself a fixture."""

    def distributed_fixture(request: pytest.FixtureRequest) -> object:
        made = cls()
        made(request)
        return made

    fixtures.register(collector, name, distributed_fixture)
