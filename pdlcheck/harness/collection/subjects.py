"""The function that a test of the suites examines."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["find", "skip_what_is_not_asked"]

_HOMES = ("pdlcheck.primitives", "pdlcheck.primitives.pagerank")


def find(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return the primitive of the marker ``verifies``, or the function that ``--subject`` names instead.

    Raises:
        pytest.UsageError: there is no marker, or the name cannot be found.
    """
    marker = request.node.get_closest_marker("verifies")
    if marker is None or len(marker.args) != 1:
        raise pytest.UsageError("fixture 'subject' needs @pytest.mark.verifies(\"primitive\") on the test")
    (name,) = marker.args
    target = _other_subject(request.config, name)
    if target:
        return _load(target)
    for home in _HOMES:
        module = importlib.import_module(home)
        found = getattr(module, name, None)
        if callable(found):  # a submodule may carry the name of its main function
            return found  # type: ignore[no-any-return]  # a module's attribute
    raise pytest.UsageError(f"verifies({name!r}): there is no such primitive in {' or '.join(_HOMES)}")


def skip_what_is_not_asked(item: pytest.Item) -> None:
    """Skip a test of a primitive that ``--subject`` replaces, if the contract does not require what it tests.

    These are tests with the marker ``beyond_contract``, tests with the marker ``if_subject_takes`` if the function has
    no such parameter, and tests that do not use the fixture ``subject`` and so run pdlcheck's own function.
    """
    marker = item.get_closest_marker("verifies")
    name = marker.args[0] if marker is not None and marker.args else ""
    target = _other_subject(item.config, name)
    if not target:
        return
    if "subject" not in getattr(item, "fixturenames", ()):
        pytest.skip(f"this test runs the {name} of pdlcheck; it says nothing about {target}")
    for beyond in item.iter_markers("beyond_contract"):
        pytest.skip(f"beyond the contract of {name}: {beyond.args[0]}; not asked of {target}")
    asked = {parameter for mark in item.iter_markers("if_subject_takes") for parameter in mark.args}
    if missing := sorted(asked - _parameters(_load(target), asked)):
        pytest.skip(f"not in the contract of {name}: parameter {', '.join(missing)}, which {target} does not have")


def _parameters(subject: Callable[..., Any], asked: set[str]) -> set[str]:
    """Return those of ``asked`` that ``subject`` takes; all of them if its signature is unknown or has ``**kwargs``."""
    try:
        found = inspect.signature(subject).parameters
    except (TypeError, ValueError):
        return asked
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found.values())
    return asked if is_open else asked & set(found)


def _other_subject(config: pytest.Config, name: str) -> str:
    """Return the MODULE:FUNCTION by which ``--subject`` replaces the primitive ``name``, or ''."""
    given = (text.partition("=") for text in config.getoption("--pdl-subject"))
    return next((target for overridden, _, target in given if overridden == name), "")


def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    try:
        return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"--subject: cannot load {target}: {error}") from error
