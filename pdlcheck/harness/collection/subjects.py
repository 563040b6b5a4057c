"""The function that a suite test is about."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["find"]

_HOMES = ("pdlcheck.primitives", "pdlcheck.primitives.pagerank")


def find(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return the primitive of the marker ``verifies``, or what ``--subject`` names instead.

    Raises:
        pytest.UsageError: no marker, or the name leads nowhere.
    """
    marker = request.node.get_closest_marker("verifies")
    if marker is None or len(marker.args) != 1:
        raise pytest.UsageError("fixture 'subject' needs @pytest.mark.verifies(\"primitive\") on the test")
    (name,) = marker.args
    for text in request.config.getoption("--pdl-subject"):
        overridden, _, target = text.partition("=")
        if overridden == name:
            return _load(*target.split(":"))
    for home in _HOMES:
        module = importlib.import_module(home)
        found = getattr(module, name, None)
        if callable(found):  # a submodule may carry the name of its main function
            return found  # type: ignore[no-any-return]  # a module's attribute
    raise pytest.UsageError(f"verifies({name!r}): there is no such primitive in {' or '.join(_HOMES)}")


def _load(module: str, function: str) -> Callable[..., Any]:
    try:
        return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"--subject: cannot load {module}:{function}: {error}") from error
