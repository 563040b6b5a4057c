"""The private names of argparse and unittest."""

from __future__ import annotations

from typing import Any

from pdlcheck.compat.private import uses

__all__ = [
    "exchange_active_mocks",
    "mock_patches",
    "name_test_method",
    "option_actions",
    "patch_dict",
    "unpatch_dict",
]


@uses("argparse.ArgumentParser._actions", lost="a warning about options that rank processes do not get")
def option_actions(parser: Any) -> list[Any]:
    """Return the options of a parser, as actions of argparse."""
    return parser._actions  # type: ignore[no-any-return]


@uses("unittest.mock._patch", "unittest.mock._patch_dict", lost="unittest.mock.patch on simulated ranks")
def mock_patches() -> tuple[Any, Any]:
    """Return the classes of ``unittest.mock.patch`` and ``patch.dict``."""
    from unittest import mock  # takes milliseconds

    return vars(mock)["_patch"], vars(mock)["_patch_dict"]  # the type stubs declare only one of them


@uses("unittest.mock._patch._active_patches", lost="mock.patch.stopall on simulated ranks")
def exchange_active_mocks(patch: Any, active: list[Any]) -> list[Any]:
    """Replace the list of the patches that ``start`` has entered; return the list in force until now."""
    patch._active_patches, before = active, patch._active_patches
    return before  # type: ignore[no-any-return]


@uses("unittest.mock._patch_dict._patch_dict", lost="mock.patch.dict on simulated ranks")
def patch_dict(patch: Any) -> None:
    """Apply a ``patch.dict``."""
    patch._patch_dict()


@uses("unittest.mock._patch_dict._unpatch_dict", lost="mock.patch.dict on simulated ranks")
def unpatch_dict(patch: Any) -> None:
    """Take a ``patch.dict`` back."""
    patch._unpatch_dict()


@uses(
    "unittest.case.TestCase._testMethodName", "unittest.case.TestCase._testMethodDoc", lost="unittest methods on ranks"
)
def name_test_method(case: Any, method: Any) -> None:
    """Let a ``TestCase`` name this method in ``id`` and ``shortDescription``."""
    case._testMethodName, case._testMethodDoc = method.__name__, method.__doc__
