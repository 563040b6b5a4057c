"""The selection of ``pdlcheck bench``: suites of this package by name, or files of the user's own tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from pdlcheck.benchmarking import unmarked
from pdlcheck.installed import installed_folder

__all__ = ["Selection", "UsageError", "select", "suite_names"]

SUITES = "pdlcheck.benchmarks"
_AT_LEAST = "--benchmark-min-rounds=3"  # rounds in each pass
_PYTEST_VARIABLES = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_XDIST_WORKER")
_NOT_WHILE_MEASURING = {"xdist": "-n0", "pytest_cov": "--no-cov"}  # plugins that a project's own options may enable
_HARMLESS = (
    "pytest.PytestAssertRewriteWarning",  # this plugin is already imported
    "pytest_benchmark.logger.PytestBenchmarkWarning",  # nothing to save, because every benchmark failed
)


class UsageError(Exception):
    """The arguments cannot be carried out; the message names them and the possible ones."""


@dataclass(frozen=True)
class Selection:
    """The call of pytest for the selected benchmarks.

    Args:
        arguments: arguments of pytest.
        variables: environment variables that replace pytest's own. For example, pytest-benchmark would not measure in a
            worker of xdist.
    """

    arguments: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Set the variables, and restore the earlier values at the end."""
        before = {name: os.environ.pop(name, None) for name in _PYTEST_VARIABLES}
        os.environ.update(self.variables)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def select(names: Sequence[str], ranks: Sequence[int], *, full: bool) -> Selection:
    """Return the call of pytest that measures ``names``.

    Args:
        names: either names of suites, or files, folders and ids of tests. Empty means all suites.
        ranks: numbers of ranks.
        full: whether to use larger inputs.

    Raises:
        UsageError: a name is neither, or the names are of both kinds.
        FileNotFoundError: the suites are not installed.
    """
    numbers = ",".join(map(str, ranks))
    folder, known = installed_folder(SUITES), suite_names()
    own = [name for name in names if name not in known and _is_a_path(name)]
    if own:
        return _of_the_user(names, own, numbers)
    for name in names:
        if name not in known:
            raise UsageError(
                f"there is no suite {name!r}, and no such file; choose from {', '.join(known)}, "
                "or name a file of tests with rank_benchmark"
            )
    arguments = [str(folder / f"bench_{name}.py") for name in names or known]
    arguments += ["--rootdir", str(folder.parent), "--confcutdir", str(folder), "-c", os.devnull]
    for plugin in ("no:cacheprovider", "pdlcheck.plugin", "pytest_benchmark.plugin"):
        arguments += ["-p", plugin]
    arguments += ["--ranks", numbers, "-o", "pdlcheck_markers=gpu", _AT_LEAST]
    arguments += ["--full"] if full else []
    return Selection(arguments, variables={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


def suite_names() -> list[str]:
    """Return the names of all suites, sorted.

    Raises:
        FileNotFoundError: the suites are not installed.
    """
    return sorted(path.stem.removeprefix("bench_") for path in installed_folder(SUITES).glob("bench_*.py"))


def _of_the_user(names: Sequence[str], own: Sequence[str], ranks: str) -> Selection:
    """Return the call for the user's tests, with the project's own settings, conftest files and plugins."""
    for name in own:
        if not Path(name.partition("::")[0]).exists():
            raise UsageError(f"there is no file {name.partition('::')[0]}")
    if suites := [name for name in names if name not in own]:
        raise UsageError(f"{own[0]} is a file and {suites[0]} a suite: measure them in two runs")
    arguments = [*own, "--benchmark-only", "-p", unmarked.__name__, unmarked.OPTION, ranks, "-p", "no:randomly"]
    arguments += [option for plugin, option in _NOT_WHILE_MEASURING.items() if find_spec(plugin)]
    for warning in _HARMLESS:  # the project may turn warnings into errors
        arguments += ["-W", f"ignore::{warning}"]
    return Selection([*arguments, _AT_LEAST])


def _is_a_path(name: str) -> bool:
    return "::" in name or os.sep in name or name.endswith(".py") or Path(name).exists()
