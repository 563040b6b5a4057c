"""Our fixtures among those of other plugins. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pdlcheck.compat.pytest.fixtures import definitions_of, repeated_definitions, sort_definitions

__all__ = [
    "LIFE",
    "RANK_FIXTURES",
    "give_way_to_other_plugins",
    "is_ours",
    "take_precedence_on_ranks",
    "uses_fixture",
    "uses_ours",
]

RANK_FIXTURES = ("device", "group", "rank", "world_size")  # fixtures that only a rank has
FIXTURES = (*RANK_FIXTURES, "rank_benchmark", "shared_tmp_path", "subject", "world")
LIFE = "_life_of_a_test_case"  # the fixture that runs a method inside of `unittest_cases.live`

_modules: pytest.StashKey[frozenset[str]] = pytest.StashKey()


def give_way_to_other_plugins(session: pytest.Session) -> None:
    """Let another plugin's fixture take precedence over ours of the same name, in whatever order they were loaded.

    pytest always prefers fixtures of conftest files and test modules to those of plugins.
    """
    sort_definitions(session, FIXTURES, is_ours)


def take_precedence_on_ranks(metafunc: pytest.Metafunc) -> None:
    """Let our fixtures take precedence on a test with ranks, because those of other plugins do not know the rank."""
    found: Any = repeated_definitions(metafunc)
    for name in FIXTURES:
        definitions = found.get(name, ())
        if len(definitions) > 1 and definitions[-1].func.__module__ in _modules_of_plugins(metafunc.config):
            found[name] = type(definitions)(sorted(definitions, key=is_ours))


def is_ours(definition: Any) -> bool:
    """Return whether this definition of a fixture is the plugin's."""
    return bool(definition.func.__module__ == "pdlcheck.plugin")


def uses_fixture(item: Any, *names: str) -> bool:
    """Return whether this test, or its definition, requests one of these fixtures and gets ours."""
    definitions = definitions_of(item)
    return any(is_ours(found[-1]) for name in names if (found := definitions.get(name)))


def uses_ours(item: Any) -> bool:
    """Return whether this test requests any fixture of ours."""
    return uses_fixture(item, *FIXTURES)


def _modules_of_plugins(config: pytest.Config) -> frozenset[str]:
    """Return the names of all modules that are plugins, without conftest files."""
    if _modules not in config.stash:
        plugins = [plugin for _, plugin in config.pluginmanager.list_name_plugin() if isinstance(plugin, ModuleType)]
        names = [plugin.__name__ for plugin in plugins if Path(plugin.__file__ or "").name != "conftest.py"]
        config.stash[_modules] = frozenset(names)
    return config.stash[_modules]
