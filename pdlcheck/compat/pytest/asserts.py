"""pytest's explanations of failed comparisons, which it installs around the protocol of an item."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from pdlcheck.compat.private import take, uses

__all__ = ["compare", "explanations_of", "set_explanations"]

_LOST = "explanations of comparisons that fail on rank processes"

_protocol = take("_pytest.assertion.pytest_runtest_protocol", "pytest's own explanation of one comparison", lost=_LOST)
_util: Any = take("_pytest.assertion.util", "pytest's explanations of failed comparisons", lost=_LOST)


@uses(
    "_pytest.assertion.util._config",
    "_pytest.assertion.util._reprcompare",
    "_pytest.assertion.util._assertion_pass",
    lost=_LOST,
)
def set_explanations(
    config: pytest.Config | None,
    explain: Callable[[str, object, object], str | None] | None,
    passed: Callable[[int, str, str], None] | None,
) -> None:
    """Replace the functions that explain failed comparisons and report passed ones."""
    _util._config, _util._reprcompare, _util._assertion_pass = config, explain, passed


def explanations_of(item: pytest.Item) -> AbstractContextManager[None]:
    """Let pytest explain failed comparisons for a test in a block."""
    return contextmanager(_protocol)(item)


def compare(op: str, left: object, right: object) -> str | None:
    """Return the explanation of the function that is in force; None if none is."""
    explain = _util._reprcompare
    return None if explain is None else explain(op, left, right)
