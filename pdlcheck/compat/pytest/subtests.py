"""pytest's fixture ``subtests``, which pytest 9 has; earlier releases report no subtests."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from pdlcheck.compat.private import uses

__all__ = ["count_failed", "is_subtests", "send_reports"]

_IS_NEW = pytest.version_tuple >= (9,)


def is_subtests(value: object) -> bool:
    """Return whether this is the value of the fixture ``subtests``."""
    return type(value).__module__ == "_pytest.subtests"


@uses(
    "_pytest.subtests.Subtests._ihook",
    "_pytest.subtests.Subtests._request",
    "_pytest.subtests.Subtests._suspend_capture_ctx",
    lost="subtests on simulated ranks",
    when=_IS_NEW,
)
def send_reports(value: Any, hooks: Any, request: Any) -> None:
    """Let a fixture ``subtests`` report through stand-ins, which are made of its hooks and its request."""
    value._ihook = hooks(value._ihook, value._request.config)
    value._request = request(value._request)
    value._suspend_capture_ctx = nullcontext  # nothing is shown now, so no capture must be suspended


@uses("_pytest.subtests.failed_subtests_key", lost="the failure of a test in which only subtests failed", when=_IS_NEW)
def count_failed(config: pytest.Config, id_of_test: Any) -> None:
    """Count a failed subtest, so that pytest fails a test in which only subtests failed."""
    from _pytest.subtests import failed_subtests_key

    config.stash[failed_subtests_key][id_of_test] += 1
