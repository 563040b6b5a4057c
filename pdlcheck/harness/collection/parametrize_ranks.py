"""Repetition of a test for each world and each world size of its marker. Does not import torch.

This module is imported only for tests that `cases.may_name_ranks` accepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from pdlcheck.compat.pytest.collection import ParameterSet, id_parts, parameter_sets, with_id_parts
from pdlcheck.compat.pytest.fixtures import repeated_definitions
from pdlcheck.harness.collection.cases import CASE, Case, is_our_world, world_names
from pdlcheck.harness.collection.distributed_tests import is_distributed_test
from pdlcheck.harness.collection.marker_ownership import claims_world_size
from pdlcheck.harness.collection.plugin_fixtures import take_precedence_on_ranks
from pdlcheck.worlds.choices import MOST_RANKS

__all__ = ["repeat", "repeat_by_parameters"]


def repeat(metafunc: pytest.Metafunc) -> None:
    """Repeat a test for each world, or for each world and world size of its marker; before it has other parameters."""
    if is_distributed_test(metafunc.cls):
        metafunc.parametrize("world", world_names(metafunc.config), indirect=True, scope="session")
        return
    claimed = claims_world_size(metafunc.definition)
    if claimed and _has_marked_parameters(metafunc.definition):
        return  # `repeat_by_parameters` repeats such a test
    marker = metafunc.definition.get_closest_marker("world_size") if claimed else None
    if marker is not None:
        take_precedence_on_ranks(metafunc)
        _add(metafunc, _cases(metafunc, marker))
    elif _uses_world(metafunc):
        metafunc.parametrize("world", world_names(metafunc.config), indirect=True, scope="session")


def repeat_by_parameters(metafunc: pytest.Metafunc) -> None:
    """Repeat a test whose marker is on some of its sets of parameters: ``pytest.param(2, marks=world_size(2))``.

    Such a marker takes precedence over a marker of the whole test. A set without either is an ordinary test, without
    ranks.
    """
    if not claims_world_size(metafunc.definition):
        return
    own = [_mark_of(call.marks) for call in parameter_sets(metafunc)]
    if is_distributed_test(metafunc.cls):
        return
    if CASE in metafunc.fixturenames or not any(own):
        return
    whole = metafunc.definition.get_closest_marker("world_size")
    marks = [mark or whole for mark in own]
    if not all(marks) and _uses_world(metafunc):  # those without the marker would run only on the first world
        what = "world_size on some parameters of a test that uses the fixture world; write a test for the others"
        pytest.fail(f"{metafunc.definition.nodeid}: {what}", pytrace=False)
    wanted: list[list[Case | None]] = [[None] if mark is None else [*_cases(metafunc, mark)] for mark in marks]
    cases = list(dict.fromkeys(case for some in wanted for case in some))
    number = len(cases)
    _add(metafunc, cases)  # combine each set with each case, as the last part of its id
    fitting = []
    for place, call in enumerate(parameter_sets(metafunc)):
        case = cases[place % number]
        if case in wanted[place // number]:
            *before, last = id_parts(call)
            fitting.append((place % number, with_id_parts(call, before if case is None else [last, *before])))
    fitting.sort(key=lambda one: one[0])  # one case after another, as with a marker of the whole test
    parameter_sets(metafunc)[:] = [call for _, call in fitting]


def _add(metafunc: pytest.Metafunc, cases: Sequence[Case | None]) -> None:
    metafunc.fixturenames.append(CASE)
    metafunc.parametrize(CASE, cases, ids=map(str, cases), indirect=False)


def _cases(metafunc: pytest.Metafunc, marker: pytest.Mark) -> list[Case]:
    names, sizes = world_names(metafunc.config), _sizes(metafunc.definition.nodeid, marker)
    timed = "rank_benchmark" in metafunc.fixturenames
    if timed and not any(map(metafunc.config.pluginmanager.has_plugin, ("benchmark", "pytest_benchmark.plugin"))):
        raise pytest.Collector.CollectError(
            f"{metafunc.definition.nodeid}: rank_benchmark needs the plugin pytest-benchmark, which is missing or "
            "switched off; install it with: pip install 'pdlcheck[bench]'"
        )
    return [Case(name, size, timed) for name in names for size in sizes]


def _has_marked_parameters(definition: pytest.Item) -> bool:
    return any(_mark_of(found.marks) for found in _parameters(definition))


def _parameters(definition: pytest.Item) -> Iterator[ParameterSet]:
    """Yield the parameters with marks; skip an iterator, because ``parametrize`` still has to read it."""
    for mark in definition.iter_markers("parametrize"):
        values = mark.args[1] if len(mark.args) > 1 else mark.kwargs.get("argvalues")
        if isinstance(values, list | tuple):
            yield from (value for value in values if isinstance(value, ParameterSet))


def _mark_of(marks: Iterable[Any]) -> pytest.Mark | None:
    """Return the first world_size mark; marks of a ``pytest.param`` are Marks, or decorators that hold one."""
    return next((getattr(mark, "mark", mark) for mark in marks if mark.name == "world_size"), None)


def _uses_world(metafunc: pytest.Metafunc) -> bool:
    return "world" in metafunc.fixturenames and is_our_world(repeated_definitions(metafunc))


def _sizes(nodeid: str, marker: pytest.Mark) -> list[int]:
    sizes = list(marker.args)
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):  # DeepSpeed writes several sizes as a list
        sizes = list(sizes[0])
    wrong = [repr(size) for size in sizes if not _is_size(size)]
    wrong += [
        f"{name}={value!r}"
        for name, value in marker.kwargs.items()
        if name != "process_group" or not isinstance(value, bool)
    ]
    if wrong or not sizes:
        group = "; process_group is True or False" if "process_group" in marker.kwargs else ""
        pytest.fail(
            f"{nodeid}: world_size takes numbers of ranks from 1 to {MOST_RANKS}, such as world_size(2, 4); "
            f"got {', '.join(wrong) or 'none'}{group}",
            pytrace=False,
        )
    return sizes


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_RANKS
