"""pytest's explanations of failed comparisons, in a rank.

pytest installs them around the protocol of an item, which a rank does not run.
"""

from __future__ import annotations

import pytest

from pdlcheck.compat.pytest.asserts import compare, explanations_of, set_explanations

__all__ = ["explain_for"]

_item: pytest.Item | None = None


def explain_for(item: pytest.Item | None) -> None:
    """Explain comparisons that fail from now on as pytest does for this item; with None, as Python does."""
    global _item
    _item = item
    if item is None:
        set_explanations(None, None, None)
    else:
        passes = item.config.getini("enable_assertion_pass_hook")
        set_explanations(item.config, _explain, _passed if passes else None)


def _explain(op: str, left: object, right: object) -> str | None:
    """Explain one failure; passing tests do not pay for it, because pytest calls this only after a failure."""
    assert _item is not None
    try:
        with explanations_of(_item):
            return compare(op, left, right)
    finally:
        explain_for(_item)


def _passed(lineno: int, orig: str, expl: str) -> None:
    assert _item is not None
    _item.ihook.pytest_assertion_pass(item=_item, lineno=lineno, orig=orig, expl=expl)
