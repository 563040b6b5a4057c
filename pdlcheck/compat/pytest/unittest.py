"""pytest's collectors of unittest methods, and the markers of a method before it is collected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlcheck.compat.private import take

__all__ = ["TestCaseFunction", "UnitTestCase", "get_unpacked_marks"]

if TYPE_CHECKING:
    from _pytest.mark.structures import get_unpacked_marks
    from _pytest.unittest import TestCaseFunction, UnitTestCase
else:
    _LOST = "unittest methods on ranks"
    TestCaseFunction = take("_pytest.unittest.TestCaseFunction", "unittest methods without ranks", lost=_LOST)
    UnitTestCase = take("_pytest.unittest.UnitTestCase", "the collection of unittest methods on ranks", lost=_LOST)
    get_unpacked_marks = take("_pytest.mark.structures.get_unpacked_marks", "the markers of a method", lost=_LOST)
