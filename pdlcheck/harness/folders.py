"""The folder that the ranks of one test share."""

from __future__ import annotations

import re
import shutil
from itertools import count
from pathlib import Path

import pytest
from _pytest.tmpdir import tmppath_result_key

__all__ = ["SHARED", "clear_shared", "has_failed", "shared_of", "shared_path"]

SHARED = pytest.StashKey[Path]()
_numbers = pytest.StashKey["count[int]"]()


def shared_path(item: pytest.Item) -> Path:
    """Choose the shared folder of an item; it is made when a rank asks for it."""
    if SHARED not in item.stash:
        numbers = item.config.stash.setdefault(_numbers, count())
        name = re.sub(r"\W", "_", item.name)[:30]
        basetemp: Path = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        item.stash[SHARED] = basetemp / f"{name}-shared{next(numbers)}"
    return item.stash[SHARED]


def shared_of(item: pytest.Item) -> Path:
    """The shared folder of an item, which exists now; the same on every rank."""
    path = shared_path(item)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def clear_shared(item: pytest.Item) -> None:
    """Remove the folder where ``tmp_path_retention_policy`` asks for it."""
    path = item.stash.get(SHARED, None)
    if path is None:
        return
    policy = item.config.getini("tmp_path_retention_policy")
    if policy == "failed" and not has_failed(item):
        shutil.rmtree(path, ignore_errors=True)


def has_failed(item: pytest.Item) -> bool:
    """A phase of the item has failed so far."""
    return not all(item.stash.get(tmppath_result_key, {}).values())
