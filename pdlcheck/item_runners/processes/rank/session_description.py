"""The part of the controller's pytest session that a rank process needs: arguments, options, warning filters."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pdlcheck.compat.pytest.config import parser_of
from pdlcheck.compat.pytest.reports import saferepr, xml_key
from pdlcheck.compat.python.unittest import option_actions
from pdlcheck.harness.collection import launch
from pdlcheck.harness.running.folders import basetemp_of, seen_from_here
from pdlcheck.item_runners.processes.rank.outside_root import paths_outside
from pdlcheck.item_runners.processes.relayed_logs import hears_records
from pdlcheck.worlds.advice import advise

__all__ = ["SessionDescription", "describe"]

# These options concern work that only the controller does: distributing tests, measuring, caching, showing, writing
# files, and debugging.
_NOT_IN_RANKS = frozenset(
    {
        *("basetemp", "cacheclear", "cacheshow", "collectonly", "debug", "dist", "failedfirst", "htmlpath", "lf"),
        *("log_file", "looponfail", "newfirst", "no_cov", "numprocesses", "pastebin", "report_log"),
        *("stepwise", "stepwise_reset", "stepwise_skip", "trace", "tx", "usepdb", "xmlpath"),
    }
)
_PLUGINS_NOT_IN_RANKS = ("cov_", "json_report")
_GIVEN_AS_ARGUMENTS = frozenset({"capture", "file_or_dir", "inifilename", "override_ini", "plugins", "rootdir"})
# pytest reads these options when it loads conftest files, before the rank can set options.
_BEFORE_CONFTEST_FILES = {"assertmode": "--assert", "confcutdir": "--confcutdir", "importmode": "--import-mode"}


@dataclass(frozen=True)
class SessionDescription:
    """The data that a rank needs to create the same session as the controller's."""

    arguments: tuple[str, ...]
    directory: str  # the start directory, even if hooks have changed the current one
    options: tuple[tuple[str, bytes], ...]  # pickled: the rank's conftest files may define the classes
    filters: tuple[Sequence[str], Sequence[str]]  # of warnings: ini file, command line
    basetemp: str
    world: str
    log_records: bool  # the controller needs the log records of each rank
    xml: bool  # the controller writes a JUnit XML file
    outside: tuple[str, ...]  # paths of the command line, if some are outside of the root folder
    seen_from: str | None  # a file that exists only on nodes that share the session's folder


def describe(config: pytest.Config, world: str) -> SessionDescription:
    """Describe the controller's session for the ranks of a world."""
    arguments = ["-p", "no:faulthandler"]
    if config.pluginmanager.hasplugin("capturemanager"):
        arguments.append("-s")
    for override in config.getoption("override_ini") or []:
        arguments += ["-o", override]
    # Only the controller writes the log file.
    arguments += ["--rootdir", str(config.rootpath), "-o", "addopts=", "-o", "log_file="]
    # The filters apply to tests only: pytest itself would warn about modules that the fork server imported before it.
    arguments += ["-o", "filterwarnings=ignore"]
    if config.getoption("noconftest"):
        arguments.append("--noconftest")
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    for name, argument in _BEFORE_CONFTEST_FILES.items():
        if (value := getattr(config.known_args_namespace, name, None)) is not None:
            value = config.invocation_params.dir / value if name == "confcutdir" else value
            arguments.append(f"{argument}={value}")
    # pytest reads this option when it loads conftest files, because those of packages may name plugins.
    if config.getoption("pyargs"):
        arguments.append("--pyargs")
    for plugin in config.getoption("plugins") or []:
        arguments += ["-p", plugin]
    arguments += config.getoption("file_or_dir") or []  # the same conftest files must add their options
    options = {
        name: _pickled(value)
        for name, value in sorted(vars(config.option).items())
        if name not in _NOT_IN_RANKS | _GIVEN_AS_ARGUMENTS and not name.startswith(_PLUGINS_NOT_IN_RANKS)
    }
    _warn_of_lost(config, [name for name, pickled in options.items() if pickled is None])
    sent = tuple((name, pickled) for name, pickled in options.items() if pickled is not None)
    filters = (config.getini("filterwarnings"), config.known_args_namespace.pythonwarnings or [])
    wanted = hears_records(config), xml_key in config.stash
    directory = str(config.invocation_params.dir)
    seen_from = str(seen_from_here(config)) if launch.spans_nodes(config) else None
    basetemp = str(basetemp_of(config))
    of_session = tuple(arguments), directory, sent, filters, basetemp, world, *wanted, paths_outside(config), seen_from
    return SessionDescription(*of_session)


def _pickled(value: object) -> bytes | None:
    """Return the pickled value; None if the value cannot be sent to ranks."""
    try:
        pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        pickle.loads(pickled)
    except Exception:  # for example an open file or a lambda; classes of users may raise any exception
        return None
    return pickled


def _warn_of_lost(config: pytest.Config, names: Sequence[str]) -> None:
    """Warn about options whose values cannot be sent to ranks.

    A default is not lost, because the rank's own parser creates it. A value that a hook has set and that is not an
    option is not reported.
    """
    parser: Any = parser_of(config)
    for action in option_actions(parser.optparser):
        value = getattr(config.option, action.dest, None)
        if action.dest in names and value is not action.default:
            advise(
                pytest.PytestConfigWarning(
                    f"{action.option_strings[-1]} is {saferepr(action.default)} in rank processes, as its value "
                    f"{saferepr(value)} cannot be sent there; let its type return what pickle takes, and make the "
                    "rest in a fixture"
                )
            )
