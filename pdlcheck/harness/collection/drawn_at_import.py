"""Test files that draw random numbers when they are imported: on a cluster each rank draws others.

Only files whose text asks for ranks are looked at: what other files draw is left as it is. Does not import torch,
except where such a file is about to.
"""

from __future__ import annotations

import random
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

from pdlcheck.errors import UnseededImportWarning
from pdlcheck.harness.collection import cases
from pdlcheck.worlds.import_streams import (
    CONTROLLER,
    ImportStreams,
    cure_of,
    drawn_by,
    seeded_so_far,
    words_of,
)

__all__ = ["differs_between_ranks", "streams_of", "warn_of_shared_values"]

_ASKS_FOR_RANKS = re.compile(r"\bworld_size\b|\bpdlcheck\b|\bdef test\w*\([^)]*\bworld\b")
_IMPORTS = {
    module: re.compile(rf"^[ \t]*(?:from[ \t]+{name}\b|import[ \t].*\b{name}\b)", re.M)
    for module, name in (("torch", "torch"), ("numpy.random", "numpy"))
}
_began = random.getstate()  # as this process began, but for what the start of pytest has drawn
_told: pytest.StashKey[set[Path]] = pytest.StashKey()


def streams_of(collector: pytest.Collector) -> AbstractContextManager[None]:
    """While the block imports a test file in the controller, it draws from streams that a replay has again."""
    is_test_file = isinstance(collector, pytest.Module) and not isinstance(collector, DoctestModule)
    if not is_test_file or cases.runs_in_a_rank(collector.config):
        return nullcontext()
    try:
        text = collector.path.read_text(encoding="utf-8")
    except (OSError, ValueError):  # pytest says what is wrong with it
        return nullcontext()
    if not _ASKS_FOR_RANKS.search(text):
        return nullcontext()
    for module, imports in _IMPORTS.items():
        if imports.search(text):
            try:
                import_module(module)  # its stream must be there before the file draws from it
            except Exception:  # as with a library that is broken: the file's own import says so
                continue
    streams = ImportStreams(CONTROLLER, collector.config.getoption("--pdl-seed"), seeded_so_far(_began))
    return streams.of(str(collector.path), keeps=True)


def warn_of_shared_values(item: pytest.Item, world_size: int) -> None:
    """Warn, once a file, that simulated ranks share what each rank of a cluster draws for itself."""
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
    if not (drawn := drawn_by(file)):
        return ""
    return (
        f"{words_of(file, drawn)}.\n"
        "The values of its globals and parameters differ between the ranks, and between them and the controller, "
        f"as on a cluster.\n--pdl-seed={seed} draws the same values again. To have the same on every rank, "
        f"seed first ({cure_of(drawn)}), or broadcast from rank 0."
    )
