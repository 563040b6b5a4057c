"""pytest's configuration: how a rank makes one, and what the controller and the ranks exchange in it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.compat.private import take, uses

__all__ = [
    "ConftestImportFailure",
    "cache_path",
    "command_line_paths",
    "configure",
    "conftest_files",
    "import_default_plugins",
    "parser_of",
    "prepare",
    "set_basetemp",
    "set_command_line_paths",
    "set_filter_lines",
    "tmp_path_factory",
]

if TYPE_CHECKING:
    from _pytest.config import ConftestImportFailure
else:
    ConftestImportFailure = take(
        "_pytest.config.ConftestImportFailure",
        "the error of a conftest file that a rank process cannot load",
        lost="tests on rank processes",
    )

prepare: Callable[[list[str]], pytest.Config] = take(
    "_pytest.config._prepareconfig", "the configuration of a rank process", lost="tests on rank processes"
)
_default_plugins: Iterable[str] = take(
    "_pytest.config.default_plugins", "imports of pytest's own plugins before ranks are forked", lost="a fast start"
)


def import_default_plugins() -> None:
    """Import pytest's own plugins."""
    for name in _default_plugins:
        importlib.import_module(f"_pytest.{name}")


@uses("_pytest.config.Config._do_configure", lost="tests on rank processes")
def configure(config: pytest.Config) -> None:
    """Call the configure hooks of all plugins, in a rank process."""
    config._do_configure()


@uses("_pytest.config.Config._inicache", lost="the warning filters of the controller on rank processes")
def set_filter_lines(config: pytest.Config, lines: Sequence[str]) -> None:
    """Replace the ini value ``filterwarnings``."""
    config._inicache["filterwarnings"] = lines


@uses("_pytest.config.Config._parser", lost="the names of our options in messages")
def parser_of(config: pytest.Config) -> pytest.Parser:
    """Return the parser of the options."""
    return config._parser


@uses(
    "_pytest.config.PytestPluginManager._conftest_plugins", lost="hooks of conftest files at the end of rank processes"
)
def conftest_files(config: pytest.Config) -> Set[Any]:
    """Return the conftest files that are loaded."""
    return config.pluginmanager._conftest_plugins


@uses("_pytest.tmpdir.pytest_configure._tmp_path_factory", lost="the session's temporary folder for ranks")
def tmp_path_factory(config: pytest.Config) -> Any:
    """Return the factory of temporary folders; None with ``-p no:tmpdir``."""
    return getattr(config, "_tmp_path_factory", None)


@uses("_pytest.tmpdir.TempPathFactory._basetemp", lost="temporary folders of each rank process's own")
def set_basetemp(factory: Any, folder: Path) -> None:
    """Replace the folder in which a factory makes temporary folders."""
    factory._basetemp = folder


@uses("_pytest.cacheprovider.Cache._getvaluepath", lost="whole values in the cache when several rank processes write")
def cache_path(cache: Any, key: str) -> str | os.PathLike[str]:
    """Return the file of a value in the cache."""
    return cache._getvaluepath(key)  # type: ignore[no-any-return]


@uses("_pytest.main.Session._initialpaths", lost="tests outside of the root folder on rank processes")
def command_line_paths(session: Any) -> Iterable[Path]:
    """Return the paths of the command line, at which node ids begin; none before the collection."""
    return getattr(session, "_initialpaths", ())


def set_command_line_paths(session: pytest.Session, paths: Iterable[Path]) -> None:
    """Replace the paths at which node ids begin."""
    session._initialpaths = frozenset(paths)
