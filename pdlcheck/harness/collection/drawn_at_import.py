"""Test files that draw random numbers when they are imported: on a cluster each rank draws others.

Only files whose text asks for ranks are looked at: what other files draw is left as it is, and nothing is imported for
them. Does not import torch, except where such a file is about to.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

from pdlcheck.harness.collection import cases

__all__ = ["asks_for_ranks", "differs_between_ranks", "streams_of", "warn_of_shared_values"]

_ASKS_FOR_RANKS = re.compile(r"\bworld_size\b|\bpdlcheck\b|\bdef test\w*\([^)]*\bworld\b")
_IMPORTS = {
    module: re.compile(rf"^[ \t]*(?:from[ \t]+{name}\b|import[ \t].*\b{name}\b)", re.M)
    for module, name in (("torch", "torch"), ("numpy.random", "numpy"))
}
_began = random.getstate()  # as this process began, but for what the start of pytest has drawn
_told: pytest.StashKey[set[Path]] = pytest.StashKey()


def asks_for_ranks(collector: pytest.Collector) -> bool:
    """Is this a test file, about to be imported in the controller, whose text asks for ranks?"""
    if not isinstance(collector, pytest.Module) or isinstance(collector, DoctestModule):
        return False
    if cases.runs_in_a_rank(collector.config):
        return False
    return _ASKS_FOR_RANKS.search(_text_of(collector.path)) is not None


@contextmanager
def streams_of(collector: pytest.Collector) -> Iterator[None]:
    """While the block imports such a file, it draws from streams that a replay has again."""
    from pdlcheck.worlds.import_streams import CONTROLLER, ImportStreams, seeded_so_far

    text = _text_of(collector.path)
    for module, imports in _IMPORTS.items():
        if imports.search(text):
            try:
                import_module(module)  # its stream must be there before the file draws from it
            except Exception:  # as with a library that is broken: the file's own import says so
                continue
    streams = ImportStreams(CONTROLLER, collector.config.getoption("--pdl-seed"), seeded_so_far(_began))
    with streams.of(str(collector.path), keeps=True):
        yield


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):  # pytest says what is wrong with it
        return ""


def warn_of_shared_values(item: pytest.Item, world_size: int) -> None:
    """Warn, once a file, that simulated ranks share what each rank of a cluster draws for itself."""
    from pdlcheck.errors import UnseededImportWarning
    from pdlcheck.worlds.import_streams import cure_of, drawn_by, words_of

    told = item.config.stash.setdefault(_told, set())
    if world_size > 1 and item.path not in told and (drawn := drawn_by(str(item.path))):
        told.add(item.path)
        warnings.warn_explicit(
            UnseededImportWarning(
                f"{words_of(item.path.name, drawn)}. Simulated ranks share what was drawn; on processes and on a "
                f"cluster each rank draws other numbers. Seed it first ({cure_of(drawn)}), draw in the test or in a "
                "fixture, or broadcast the values and ignore this warning"
            ),
            UnseededImportWarning,
            str(item.path),
            1,
        )


def differs_between_ranks(file: str, seed: int) -> str:
    """What to say of a failure on processes; empty if the file draws nothing when it is imported."""
    from pdlcheck.worlds.import_streams import cure_of, drawn_by, words_of

    if not (drawn := drawn_by(file)):
        return ""
    return (
        f"{words_of(file, drawn)}.\n"
        "The values of its globals and parameters differ between the ranks, and between them and the controller, "
        f"as on a cluster.\n--pdl-seed={seed} draws the same values again. To have the same on every rank, "
        f"seed first ({cure_of(drawn)}), or broadcast from rank 0."
    )
