"""The cache of a rank's pytest session: all ranks write into the cache folder of the controller."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

from pdlcheck.compat.pytest.config import cache_path
from pdlcheck.worlds.processes.rank.own_rank import own_rank

__all__ = ["write_whole_values"]


def write_whole_values(config: pytest.Config) -> None:
    """Write each cache value to a file of this process and rename it, so that concurrent writers never mix their data.

    pytest itself writes into the final file.
    """
    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    if cache is None:
        return
    pytests = cache.set

    def set_whole(key: str, value: object) -> None:
        own = f"{key}.rank{own_rank()}-{os.getpid()}"
        pytests(own, value)
        with suppress(OSError):  # pytest could not write the value and has warned about it
            os.replace(cache_path(cache, own), cache_path(cache, key))

    cache.set = set_whole
