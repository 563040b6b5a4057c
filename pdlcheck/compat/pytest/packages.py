"""The packages of pytest's own code."""

from __future__ import annotations

from typing import Final

__all__ = ["PYTEST_PACKAGES"]

PYTEST_PACKAGES: Final = ("_pytest", "pluggy")  # their files call the tests of a program
