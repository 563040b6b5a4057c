"""Test files that draw random numbers when they are imported: on a cluster, each rank draws different numbers.

Only files whose text mentions ranks are examined. The random numbers of other files stay as they are, and nothing is
imported for them. This module does not import torch, unless such a file is about to import it.
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

from pdlcheck.compat.pytest.collection import DoctestModule
from pdlcheck.harness.collection import cases

__all__ = ["asks_for_ranks", "differs_between_ranks", "streams_of", "warn_of_shared_values"]

_ASKS_FOR_RANKS = re.compile(r"\bworld_size\b|\bpdlcheck\b|\bdef test\w*\([^)]*\bworld\b")
_IMPORTS = {
    module: re.compile(rf"^[ \t]*(?:from[ \t]+{name}\b|import[ \t].*\b{name}\b)", re.M)
    for module, name in (("torch", "torch"), ("numpy.random", "numpy"))
}
_began = random.getstate()  # the state at the start of this process, except for numbers that pytest's start has drawn
_told: pytest.StashKey[set[Path]] = pytest.StashKey()


def asks_for_ranks(collector: pytest.Collector) -> bool:
    """Return whether this is a test file, about to be imported in the controller, whose text mentions ranks."""
    if not isinstance(collector, pytest.Module) or isinstance(collector, DoctestModule):
        return False
    if cases.runs_in_a_rank(collector.config):
        return False
    return _ASKS_FOR_RANKS.search(_text_of(collector.path)) is not None


@contextmanager
def streams_of(collector: pytest.Collector) -> Iterator[None]:
    """Let a file that is imported in the block draw from random streams that a replay repeats."""
    from pdlcheck.worlds.import_streams import CONTROLLER, ImportStreams, seeded_so_far

    text = _text_of(collector.path)
    for module, imports in _IMPORTS.items():
        if imports.search(text):
            try:
                import_module(module)  # its random stream must exist before the file draws from it
            except Exception:  # for example a broken library; the file's own import raises it again
                continue
    options = collector.config.option
    of_randomly = getattr(options, "randomly_seed", None)  # pytest-randomly has seeded streams when the session began
    seeded = seeded_so_far(_began, of_randomly if isinstance(of_randomly, int) else None)
    streams = ImportStreams(CONTROLLER, options.pdl_seed, seeded)
    with streams.of(str(collector.path), keeps=True):
        yield


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):  # pytest reports the error
        return ""


def warn_of_shared_values(item: pytest.Item, world_size: int) -> None:
    """Warn, once for each file, that simulated ranks share numbers that each rank of a cluster draws for itself."""
    from pdlcheck.errors import UnseededImportWarning
    from pdlcheck.worlds.import_streams import cure_of, drawn_by, words_of

    told = item.config.stash.setdefault(_told, set())
    if world_size > 1 and item.path not in told and (drawn := drawn_by(str(item.path))):
        told.add(item.path)
        warnings.warn_explicit(
            UnseededImportWarning(
                f"{words_of(item.path.name, drawn)}. Simulated ranks share what was drawn; on processes and on a "
                f"cluster each rank draws other numbers. Seed it first ({cure_of(drawn)}), draw in the test or in a "
                "fixture, name the module in pdlcheck_own_globals, or broadcast the values and ignore this warning"
            ),
            UnseededImportWarning,
            str(item.path),
            1,
        )


def differs_between_ranks(file: str, seed: int) -> str:
    """Return a hint for a failure on processes; empty if the file draws nothing when it is imported."""
    from pdlcheck.worlds.import_streams import cure_of, drawn_by, words_of

    if not (drawn := drawn_by(file)):
        return ""
    return (
        f"{words_of(file, drawn)}.\n"
        "The values of its globals and parameters differ between the ranks, and between them and the controller, "
        f"as on a cluster.\n--pdl-seed={seed} draws the same values again. To have the same on every rank, "
        f"seed first ({cure_of(drawn)}), or broadcast from rank 0."
    )
