"""The folder that the ranks of one test share, inside of the session's folder."""

from __future__ import annotations

import platform
import re
import secrets
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from pdlcheck.compat.pytest.config import tmp_path_factory
from pdlcheck.compat.pytest.items import results_key

__all__ = [
    "SEEN_FROM",
    "SHARED",
    "Folders",
    "basetemp_of",
    "clear_shared",
    "empty_shared",
    "has_failed",
    "seen_from_here",
    "shared_of",
    "shared_path",
]

SHARED = pytest.StashKey[Path]()
SEEN_FROM = pytest.StashKey[Path]()  # a file in the session's folder; a node that sees it sees the whole folder
_numbers = pytest.StashKey["count[int]"]()
_without_plugin = pytest.StashKey[Path]()


def basetemp_of(config: pytest.Config) -> Path:
    """Return the session's folder for temporary files: pytest's own, or one of ours with ``-p no:tmpdir``.

    In a worker of pytest-xdist, pytest's folder belongs to the worker.
    """
    factory = tmp_path_factory(config)
    if factory is not None:
        basetemp: Path = factory.getbasetemp()
        return basetemp
    if _without_plugin not in config.stash:
        config.stash[_without_plugin] = Path(tempfile.mkdtemp(prefix="pdlcheck-"))
        config.add_cleanup(partial(shutil.rmtree, config.stash[_without_plugin], ignore_errors=True))
    return config.stash[_without_plugin]


def seen_from_here(config: pytest.Config) -> Path:
    """Return a file in the session's folder that no other session has; a rank that sees it shares this folder."""
    if SEEN_FROM not in config.stash:
        config.stash[SEEN_FROM] = basetemp_of(config) / f".seen-{secrets.token_hex(8)}"
        config.stash[SEEN_FROM].touch()
    return config.stash[SEEN_FROM]


def shared_path(item: pytest.Item) -> Path:
    """Return the shared folder of an item; it is created when a rank requests it."""
    if SHARED not in item.stash:
        numbers = item.config.stash.setdefault(_numbers, count())
        name = re.sub(r"\W", "_", item.name)[:30]
        item.stash[SHARED] = basetemp_of(item.config) / f"{name}-shared{next(numbers)}"
    return item.stash[SHARED]


def shared_of(item: pytest.Item) -> Path:
    """Return the shared folder of an item, which is the same on every rank, and create it if necessary."""
    path, seen = shared_path(item), item.config.stash.get(SEEN_FROM, None)
    if seen is not None and not seen.exists():
        pytest.fail(
            f"shared_tmp_path must be on a file system that all nodes share: {platform.node()} does not see "
            f"{seen.parent} of rank 0; pass --basetemp with a folder that every node sees",
            pytrace=False,
        )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def clear_shared(item: pytest.Item) -> None:
    """Remove the shared folder if ``tmp_path_retention_policy`` requires it."""
    path = item.stash.get(SHARED, None)
    if path is None or _without_plugin in item.config.stash:
        return
    policy = item.config.getini("tmp_path_retention_policy")
    if policy == "failed" and not has_failed(item):
        shutil.rmtree(path, ignore_errors=True)


class Folders:
    """The temporary folders of a test that runs several times; each run starts without the files of the previous one.

    Files that existed before the first run are left alone, even if a run has changed them.
    """

    def __init__(self, item: pytest.Item) -> None:
        arguments = getattr(item, "funcargs", {})
        given = [arguments.get("tmp_path"), arguments.get("tmpdir"), item.stash.get(SHARED, None)]
        self._folders = {Path(path) for path in given if path is not None}
        self._before = {path for folder in self._folders for path in folder.rglob("*")}

    def restore(self) -> None:
        """Remove the files that appeared since this object was created."""
        for folder in self._folders:
            for path in sorted(folder.rglob("*"), reverse=True):  # the content of a folder before the folder itself
                if path not in self._before:
                    with suppress(OSError):
                        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def empty_shared(item: pytest.Item) -> None:
    """Remove the files of one run from the shared folder, before ranks with new fixtures begin."""
    if SHARED in item.stash:
        shutil.rmtree(item.stash[SHARED], ignore_errors=True)


def has_failed(item: pytest.Item) -> bool:
    """Return whether a phase of the item has failed so far."""
    return not all(item.stash.get(results_key, {}).values())
