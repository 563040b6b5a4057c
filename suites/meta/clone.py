"""The folder that holds the suites: in a clone of the repository, the tested files are beside them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROOT"]

ROOT = Path(__file__).parents[len(__package__.split("."))]  # pdlcheck.suites.meta in an installed package
