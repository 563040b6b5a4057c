"""The cache of a rank's pytest session: the folder of the controller's, to which all ranks write."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

from pdlcheck.worlds.processes.rank.own_rank import own_rank

__all__ = ["write_whole_values"]


def write_whole_values(config: pytest.Config) -> None:
    """A value is there as one rank wrote it, also where several write at once: pytest writes into the file itself."""
    cache = getattr(config, "cache", None)  # absent at -p no:cacheprovider
    if cache is None:
        return
    pytests = cache.set

    def set_whole(key: str, value: object) -> None:
        own = f"{key}.rank{own_rank()}-{os.getpid()}"
        pytests(own, value)
        with suppress(OSError):  # pytest could not write and has warned
            os.replace(cache._getvaluepath(own), cache._getvaluepath(key))

    cache.set = set_whole
