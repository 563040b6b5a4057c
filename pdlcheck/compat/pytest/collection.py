"""pytest's collection of test files, and of the sets of parameters with which a test is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.compat.private import take, uses

__all__ = ["DoctestModule", "ParameterSet", "id_parts", "parameter_sets", "with_id_parts"]

if TYPE_CHECKING:
    from _pytest.doctest import DoctestModule
    from _pytest.mark.structures import ParameterSet
else:
    DoctestModule = take(
        "_pytest.doctest.DoctestModule", "modules that are no test files", lost="imports of test files with fixed seeds"
    )
    ParameterSet = take(
        "_pytest.mark.structures.ParameterSet",
        "the markers of a pytest.param",
        lost="the marker world_size on some parameters of a test",
    )


@uses("_pytest.python.Metafunc._calls", lost="the marker world_size on some parameters of a test")
def parameter_sets(metafunc: pytest.Metafunc) -> list[Any]:
    """Return the sets of parameters of a test; changes apply to the test."""
    return metafunc._calls


@uses(
    "_pytest.python.CallSpec._idlist or _pytest.python.CallSpec2._idlist",  # pytest 9 or 8
    lost="the ids of a test with the marker world_size on some parameters",
)
def id_parts(parameters: Any) -> Sequence[str]:
    """Return the parts of a test's id, one for each parametrization."""
    return parameters._idlist  # type: ignore[no-any-return]


def with_id_parts(parameters: Any, parts: Sequence[str]) -> Any:
    """Return a set of parameters with these parts of the id."""
    return replace(parameters, _idlist=parts)
