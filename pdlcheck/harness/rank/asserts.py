"""pytest's explanations of failed comparisons, in a rank.

pytest installs them around the protocol of an item, which a rank does not run.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from _pytest import assertion
from _pytest.assertion import util

__all__ = ["explain_for"]

_item: pytest.Item | None = None
_protocol = contextmanager(assertion.pytest_runtest_protocol)


def explain_for(item: pytest.Item | None) -> None:
    """Explain comparisons that fail from now on as pytest does for this item; with None, as Python does."""
    global _item
    _item = item
    util._config = None if item is None else item.config
    util._reprcompare = None if item is None else _explain
    passes = item is not None and item.config.getini("enable_assertion_pass_hook")
    util._assertion_pass = _passed if passes else None


def _explain(op: str, left: object, right: object) -> str | None:
    """Explain one failure; passing tests do not pay for it, because pytest calls this only after a failure."""
    assert _item is not None
    try:
        with _protocol(_item):
            compare = util._reprcompare
            return None if compare is None else compare(op, left, right)
    finally:
        explain_for(_item)


def _passed(lineno: int, orig: str, expl: str) -> None:
    assert _item is not None
    _item.ihook.pytest_assertion_pass(item=_item, lineno=lineno, orig=orig, expl=expl)
