"""The decision whether a marker of an item is pdlcheck's or the user's own. Does not import torch.

A project that registers a marker of one of our names gives it a meaning of its own. Then the marker is ours only on
tests that use our fixtures, or if the project says so with ``--world`` or the ini value ``pdlcheck_markers``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pdlcheck.harness.collection.options import OWN_MARKERS
from pdlcheck.harness.collection.plugin_fixtures import RANK_FIXTURES, uses_fixture, uses_ours

__all__ = [
    "claims_world_size",
    "is_concerned",
    "is_registered_by_others",
    "note_what_was_asked",
    "register",
    "skips_without_cuda",
]

_ON_RANKS = (*RANK_FIXTURES, "rank_benchmark", "world")  # a test that requests one of these fixtures uses our markers
MARKERS = (
    "world_size(*sizes, process_group=True): run the body of the test on every rank, once for each number of ranks; "
    "with process_group=False the ranks begin without a default process group",
    "isolation(mode): what the test shares with others on processes: 'pool', 'reinit' or 'fresh'",
    "semantics(profile, **changes): what the simulated network does where the rules leave a choice, such as "
    "semantics('nccl') or semantics(send='buffered', leaks=False); real backends have their own",
    "faults(*faults): on sim, what the ranks suffer in the body of the test, such as faults(Kill(rank=1, operation=3))",
    "schedules(count): on sim, run the test under so many schedules, or under 'all' of them that differ",
    "gpu: needs CUDA; skipped with a reason where there is none, on tests with ranks, or if pdlcheck_markers names it",
    "verifies(primitive): the primitive that a suite test is about; the fixture `subject` returns it",
    "beyond_contract(what): a test of what pdlcheck's own primitive promises beyond its contract, such as its error "
    "messages; skipped for a function of --subject",
    "if_subject_takes(*parameters): skipped for a function of --subject without these parameters",
)
_TIMEOUT = "timeout(seconds): time limit of the test on its ranks"
_OURS = frozenset((*MARKERS, _TIMEOUT))
_NAMES = frozenset(line.partition("(")[0].partition(":")[0] for line in _OURS)
_SUITES = "pdlcheck.suites"

_registered: pytest.StashKey[frozenset[str]] = pytest.StashKey()
_suites: pytest.StashKey[Path | None] = pytest.StashKey()


def register(config: pytest.Config) -> None:
    """Register our markers for ``pytest --markers`` and ``--strict-markers``."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", _TIMEOUT)


def note_what_was_asked(config: pytest.Config) -> None:
    """Record whether the user named worlds, before the default replaces the option.

    Ranks and the workers of pytest-xdist receive the record as an option.
    """
    option: Any = config.option
    if not hasattr(option, "pdl_world_was_given"):
        option.pdl_world_was_given = option.pdl_world is not None


def claims_world_size(definition: pytest.Item | pytest.Collector) -> bool:
    """Return whether a marker ``world_size`` of this test or class is ours."""
    config = definition.config
    if not is_registered_by_others(config, "world_size") or is_named(config, "world_size"):
        return True
    return config.option.pdl_world_was_given or uses_fixture(definition, *_ON_RANKS)


def skips_without_cuda(item: pytest.Item, *, on_ranks: bool) -> bool:
    """Return whether a marker ``gpu`` of this test is ours."""
    return on_ranks or is_named(item.config, "gpu") or uses_fixture(item, *_ON_RANKS) or _is_suite(item)


def is_concerned(item: pytest.Item) -> bool:
    """Return whether this test has a marker of one of our names, or requests one of our fixtures."""
    return any(mark.name in _NAMES for mark in item.iter_markers()) or uses_ours(item)


def is_named(config: pytest.Config, marker: str) -> bool:
    """Return whether the ini value declares this marker ours."""
    return marker in config.getini(OWN_MARKERS)


def is_registered_by_others(config: pytest.Config, marker: str) -> bool:
    """Return whether the project, or another plugin, registers a marker of this name."""
    if _registered not in config.stash:
        lines = [line for line in config.getini("markers") if line not in _OURS]
        config.stash[_registered] = frozenset(line.partition(":")[0].partition("(")[0].strip() for line in lines)
    return marker in config.stash[_registered]


def _is_suite(item: pytest.Item) -> bool:
    stash = item.config.stash
    if _suites not in stash:
        spec = find_spec(_SUITES)
        found = spec.submodule_search_locations if spec is not None else None
        stash[_suites] = Path(found[0]) if found else None
    folder = stash[_suites]
    return folder is not None and item.path.is_relative_to(folder)
