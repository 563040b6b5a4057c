"""What the pytest session in a rank process has from the controller's: arguments, options, filters of warnings."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from _pytest._io.saferepr import saferepr
from _pytest.junitxml import xml_key

from pdlcheck.harness.rank.outside_root import paths_outside
from pdlcheck.harness.reporting.relayed_logs import hears_records
from pdlcheck.harness.running import launched
from pdlcheck.harness.running.folders import basetemp_of, seen_from_here
from pdlcheck.worlds.advice import advise

__all__ = ["SessionDescription", "describe"]

# what the controller alone distributes, measures, remembers, shows, writes or asks
_NOT_IN_RANKS = frozenset(
    {
        *("basetemp", "cacheclear", "cacheshow", "collectonly", "debug", "dist", "failedfirst", "htmlpath", "lf"),
        *("log_file", "looponfail", "newfirst", "no_cov", "numprocesses", "pastebin", "report_log"),
        *("stepwise", "stepwise_reset", "stepwise_skip", "trace", "tx", "usepdb", "xmlpath"),
    }
)
_PLUGINS_NOT_IN_RANKS = ("cov_", "json_report")
_GIVEN_AS_ARGUMENTS = frozenset({"capture", "file_or_dir", "inifilename", "override_ini", "plugins", "rootdir"})
# read when conftest files are loaded, which is before options are set
_BEFORE_CONFTEST_FILES = {"assertmode": "--assert", "confcutdir": "--confcutdir", "importmode": "--import-mode"}


@dataclass(frozen=True)
class SessionDescription:
    """What a rank needs to make the same session as the controller's."""

    arguments: tuple[str, ...]
    directory: str  # from which it was started, whatever hooks have made the present one
    options: tuple[tuple[str, bytes], ...]  # pickled: a conftest file of the rank may define the classes of values
    filters: tuple[Sequence[str], Sequence[str]]  # of warnings: from the ini file, from the command line
    basetemp: str
    world: str
    log_records: bool  # of each rank are wanted
    xml: bool  # is written
    outside: tuple[str, ...]  # of the root folder: what the command line collects there
    seen_from: str | None  # a file by which a rank on another node sees whether it shares the folder


def describe(config: pytest.Config, world: str) -> SessionDescription:
    """The controller's session, for the ranks of a world."""
    arguments = ["-p", "no:faulthandler"]
    if config.pluginmanager.hasplugin("capturemanager"):
        arguments.append("-s")
    for override in config.getoption("override_ini") or []:
        arguments += ["-o", override]
    arguments += ["--rootdir", str(config.rootpath), "-o", "addopts=", "-o", "log_file="]  # one file, one writer
    # filters are for tests: pytest itself warns of modules that the fork server imported before it
    arguments += ["-o", "filterwarnings=ignore"]
    if config.getoption("noconftest"):
        arguments.append("--noconftest")
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    for name, argument in _BEFORE_CONFTEST_FILES.items():
        if (value := getattr(config.known_args_namespace, name, None)) is not None:
            value = config.invocation_params.dir / value if name == "confcutdir" else value
            arguments.append(f"{argument}={value}")
    if config.getoption("pyargs"):  # read when conftest files are loaded: those of packages may name plugins
        arguments.append("--pyargs")
    for plugin in config.getoption("plugins") or []:
        arguments += ["-p", plugin]
    arguments += config.getoption("file_or_dir") or []  # so that the same conftest files add their options
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
    seen_from = str(seen_from_here(config)) if launched.spans_nodes(config) else None
    basetemp = str(basetemp_of(config))
    of_session = tuple(arguments), directory, sent, filters, basetemp, world, *wanted, paths_outside(config), seen_from
    return SessionDescription(*of_session)


def _pickled(value: object) -> bytes | None:
    """None where ranks cannot have the value."""
    try:
        pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        pickle.loads(pickled)
    except Exception:  # an open file, a lambda; classes of users may raise anything
        return None
    return pickled


def _warn_of_lost(config: pytest.Config, names: Sequence[str]) -> None:
    """A default is no loss, as the rank's own parser makes it; nor is what a hook has set that is no option."""
    for action in config._parser.optparser._actions:
        value = getattr(config.option, action.dest, None)
        if action.dest in names and value is not action.default:
            advise(
                pytest.PytestConfigWarning(
                    f"{action.option_strings[-1]} is {saferepr(action.default)} in rank processes, as its value "
                    f"{saferepr(value)} cannot be sent there; let its type return what pickle takes, and make the "
                    "rest in a fixture"
                )
            )
