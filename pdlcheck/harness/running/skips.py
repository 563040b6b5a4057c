"""Skips of tests on ranks. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdlcheck.compat.pytest.items import show_at_item, skip_at_item
from pdlcheck.errors import WorldTooSmall

__all__ = ["MISSING", "plain_skips", "skip_or_fail", "too_few_ranks_skip"]

MISSING = "pdlcheck_missing"  # attribute of a failure, and of its report: the world of the test is missing


def skip_or_fail(config: pytest.Config, reason: str) -> BaseException:
    """Return the exception for a test whose world this machine does not have, or not with enough ranks.

    It is a skip; with ``--no-skip-worlds`` it is a failure, so that a run in CI cannot pass without running its tests.
    """
    if config.getoption("--pdl-no-skip-worlds", False):
        missing = pytest.fail.Exception(f"{reason} (--no-skip-worlds)", pytrace=False)
        setattr(missing, MISSING, True)
        return missing
    return skip_at_item(reason)


@contextmanager
def plain_skips() -> Iterator[None]:
    """Remove the notes about ranks from a skip in the block, so that its reason stands alone."""
    __tracebackhide__ = True
    try:
        yield
    except pytest.skip.Exception as skip:
        if story := getattr(skip, "__notes__", None):
            story.clear()
            show_at_item(skip)  # the location in the rank is not sent to the controller
        raise


@contextmanager
def too_few_ranks_skip(item: pytest.Item) -> Iterator[None]:
    """Skip a test that needs more ranks than a launch has; a property is skipped at its first such example."""
    __tracebackhide__ = True
    try:
        yield
    except Exception as error:
        if isinstance(error, WorldTooSmall):
            from pdlcheck.harness.running.examples import is_property

            words = f"an example {error}; others may need more" if is_property(item) else str(error)
            raise skip_or_fail(item.config, words) from None
        raise
