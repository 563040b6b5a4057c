"""Imports of optional libraries: the error of a failed import names the extra of pdlcheck that installs the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MissingExtra", "extra"]


class MissingExtra(ImportError):
    """An optional library that is not installed; the message contains the command that installs it."""


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Make an ``ImportError`` of the block name the extra that installs the library.

    Args:
        name: the extra, as in pyproject.toml.
        purpose: the subject of the message, such as ``pagerank`` or ``reading .parquet``.

    Raises:
        MissingExtra: the block raised an ImportError.

    Example:
        >>> with extra("zstd", "it"):
        ...     import missing
        Traceback (most recent call last):
        ...
        pdlcheck.extras.MissingExtra: it needs an extra (No module named 'missing'): pip install 'pdlcheck[zstd]'
    """
    try:
        yield
    except ImportError as error:
        cure = f"pip install 'pdlcheck[{name}]'"
        raise MissingExtra(f"{purpose} needs an extra ({error}): {cure}", name=error.name) from error
