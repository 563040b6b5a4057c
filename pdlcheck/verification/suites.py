"""The run of the suites in one pytest session of this process, with a record of every test."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

from pdlcheck.installed import installed_folder
from pdlcheck.report.progress import display
from pdlcheck.report.records import PropertyRecord, SuiteRun
from pdlcheck.verification.collector import Collector

__all__ = ["UsageError", "run_suites", "suites_folder"]

SUITES = "pdlcheck.suites"
PROFILE = "pdlcheck verify"
SEEDS = ("--pdl-seed=0", "--hypothesis-seed=0")  # every run and every replay tries the same examples


class UsageError(Exception):
    """A request of the user that is invalid; the message names the valid ones."""


def suites_folder() -> Path:
    """Return the folder of the suites: in the installed package, or in the repository of an editable installation.

    Raises:
        FileNotFoundError: pdlcheck was imported from a folder, but is not installed.
    """
    return installed_folder(SUITES)


def run_suites(worlds: Sequence[str], *, examples: int, subjects: Sequence[str] = ()) -> SuiteRun:
    """Run the suites on ``worlds`` with ``examples`` for each property, and show progress on stdout.

    The user's own pytest configuration, plugins and conftest files are ignored. No file is written into the current
    folder.

    Args:
        worlds: names that ``--world`` takes.
        examples: number of Hypothesis examples for each property that does not set its own number.
        subjects: ``NAME=MODULE:FUNCTION``; if given, only the suites of those primitives run, on those functions.

    Raises:
        FileNotFoundError: the suites are not installed.
        UsageError: no suite tests one of the subjects.
    """
    folder = suites_folder()
    chosen = [argument for subject in subjects for argument in ("--subject", subject)]
    where = ["--world", ",".join(worlds)]
    arguments = [str(folder), f"--ignore={folder / 'meta'}", "--rootdir", str(folder.parent)]
    arguments += ["-c", os.devnull, "--noconftest", "--continue-on-collection-errors"]
    for plugin in ("no:cacheprovider", "pdlcheck", "_hypothesis_pytestplugin"):
        arguments += ["-p", plugin]
    arguments += [*where, *SEEDS, *chosen]
    names = [subject.partition("=")[0] for subject in subjects]
    start = time.perf_counter()
    with (
        TemporaryDirectory(prefix="pdlcheck-") as home,
        _hypothesis_settings(examples, home),
        _environment(home),
        display() as progress,
    ):
        collector = Collector(progress, names, lambda nodeid, world: _replay(folder, nodeid, world, chosen))
        code = pytest.main(arguments, plugins=[collector])
    if collector.unknown:
        known = ", ".join(sorted(collector.known))
        raise UsageError(f"--subject: no suite is about {collector.unknown!r}; suites are about {known}")
    problem = _problem(code, collector) or _nothing_asked(collector.records, subjects)
    return SuiteRun(tuple(collector.records), time.perf_counter() - start, problem)


def _problem(code: int | pytest.ExitCode, collector: Collector) -> str:
    match code:
        case pytest.ExitCode.OK | pytest.ExitCode.TESTS_FAILED:
            return ""
        case pytest.ExitCode.INTERRUPTED:
            return "interrupted; the table holds what had ended"
        case pytest.ExitCode.NO_TESTS_COLLECTED:
            return "there was no test to run"
        case _:
            return collector.internal_error or f"pytest ended with exit code {int(code)}"


def _nothing_asked(records: Sequence[PropertyRecord], subjects: Sequence[str]) -> str:
    """Return a message that names the subjects whose tests were all skipped; empty if there are none."""
    tested = {record.primitive for record in records if record.outcome != "skipped"}
    untested = [subject for subject in subjects if subject.partition("=")[0] not in tested]
    return f"every test was skipped: nothing is known of {', '.join(untested)}" if untested else ""


def _replay(folder: Path, nodeid: str, world: str, subjects: Sequence[str]) -> str:
    """Return the command that runs one test again, from any folder; it resolves subjects as the user's command did."""
    path, separator, test = nodeid.partition("::")
    module = Path(path).relative_to(folder.name).with_suffix("")
    command = ["python", "-m", "pytest", "--pyargs", f"{SUITES}.{'.'.join(module.parts)}{separator}{test}"]
    command += [] if world == "-" else ["--world", world]
    return shlex.join([*command, *SEEDS, *subjects])


@contextmanager
def _hypothesis_settings(examples: int, home: str) -> Iterator[None]:
    """Use no database, write files only into ``home``, and set no time limits.

    Time limits belong to the worlds, and machines may be slow.
    """
    before = settings.get_current_profile_name()
    slow = [HealthCheck.too_slow]
    settings.register_profile(PROFILE, max_examples=examples, deadline=None, database=None, suppress_health_check=slow)
    settings.load_profile(PROFILE)
    set_hypothesis_home_dir(home)
    try:
        yield
    finally:
        set_hypothesis_home_dir(None)
        settings.load_profile(before)


@contextmanager
def _environment(home: str) -> Iterator[None]:
    """Set what pytest and Hypothesis read from the environment, here and in rank processes that start in the block."""
    before = dict(os.environ)
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):  # the user's own options and plugins do not apply to this run
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = home
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
