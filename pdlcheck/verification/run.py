"""The steps of ``pdlcheck verify``, and the output of each."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from pdlcheck.extras import MissingExtra
from pdlcheck.report import tables
from pdlcheck.report.records import (
    PackageRanking,
    ReplicaTraining,
    SuiteRun,
    Verification,
    WorldTrial,
    rows,
    skip_reasons,
)
from pdlcheck.report.tables import BAD, GOOD, SKIPPED, count, heading, line, trial_line
from pdlcheck.verification.replicas import train_replicas
from pdlcheck.verification.suites import UsageError, run_suites
from pdlcheck.verification.worlds import try_world
from pdlcheck.worlds.registry import worlds_on

__all__ = ["UsageError", "verify"]


def verify(
    console: Console, *, worlds: Sequence[str] | None = None, examples: int = 20, subjects: Sequence[str] = ()
) -> Verification:
    """Run all verifications, print the results, and return them.

    Args:
        console: where the results are printed; the progress of the suites goes to stdout.
        worlds: names of worlds; ``None`` means all that work on this machine. A named world must work.
        examples: number of examples for each property that does not set its own number.
        subjects: ``NAME=MODULE:FUNCTION``: run only the suites of these primitives, on these functions.

    Raises:
        UsageError: a subject cannot be loaded, or no suite tests it.
        FileNotFoundError: the suites are not installed.
    """
    start = time.perf_counter()
    _require_subjects(subjects)
    trials = _try_worlds(console, worlds)
    found = [trial.name for trial in trials if trial.works]
    run = SuiteRun((), 0.0, "no world works here")
    if found:
        run = run_suites(found, examples=examples, subjects=subjects)
    _show_suites(console, run)
    packages, replicas, left_out = None, None, ""
    if not subjects and not run.problem:
        packages = _show_packages(console)
        replicas, left_out = _show_replicas(console)
    held = run.held and all(part is None or part.held for part in (packages, replicas))
    held = held and (worlds is None or len(found) == len(trials))
    seconds = time.perf_counter() - start
    console.print()
    line(console, _summary(run, held, seconds), style=GOOD if held else BAD)
    return Verification(trials, run, packages, replicas, held, seconds, left_out)


def _summary(run: SuiteRun, held: bool, seconds: float) -> str:
    outcomes = Counter(record.outcome for record in run.records)
    parts = [count(outcomes["holds"], "property") + ("" if held else " held")]
    parts += [f"{outcomes['fails']} failed"] if outcomes["fails"] else []
    parts += [f"{outcomes['skipped']} skipped"] if outcomes["skipped"] else []
    parts += [count(sum(record.examples for record in run.records), "example"), f"{seconds:.0f} s"]
    return ("all held: " if held else "NOT all held: ") + ", ".join(parts)


def _require_subjects(subjects: Sequence[str]) -> None:
    for subject in subjects:
        module, _, function = subject.partition("=")[2].partition(":")
        try:
            found = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"--subject: cannot load {module}:{function}: {error}") from error
        if not callable(found):
            raise UsageError(f"--subject: {module}:{function} is {found!r}, which cannot be called")


def _try_worlds(console: Console, asked: Sequence[str] | None) -> list[WorldTrial]:
    heading(console, "worlds")
    trials = []
    for name in asked or sorted(worlds_on("cpu"), key=lambda name: (name != "sim", name)):  # the fastest first
        trials.append(trial := try_world(name))
        line(console, trial_line(trial), style="" if trial.works else SKIPPED if asked is None else BAD)
    return trials


def _show_suites(console: Console, run: SuiteRun) -> None:
    heading(console, f"suites, {run.seconds:.0f} s")
    if run.records:
        console.print(tables.suites_table(rows(run.records)))
    for reason, number in skip_reasons(run.records).items():
        line(console, f"{number} skipped: {reason}", style=SKIPPED)
    if run.problem:
        line(console, run.problem, style=BAD)
    for record in run.failures:
        tables.failure(console, record)


def _show_packages(console: Console) -> PackageRanking | None:
    heading(console, "PageRank of the packages of Debian 12 by their dependencies")
    try:
        from pdlcheck.verification.packages import DENSE_NODES, rank_packages
    except MissingExtra as error:
        line(console, f"left out: {error}", style=SKIPPED)
        return None
    ranking = rank_packages()
    bound = f"{ranking.iterations} rounds, L1 error at most {ranking.error_bound:.1e}"
    dense = ranking.agreements[0].num_nodes ** 2 * 8 / 1e9
    console.print(tables.packages_table(ranking))
    line(console, f"scores by pagerank(): {bound}; {ranking.seconds:.1f} s for all versions")
    console.print(tables.agreements_table(ranking.agreements))
    line(console, "difference: sum over the nodes, of the two versions that differ most")
    line(
        console,
        f"v2 and v3 are dense, {dense:.0f} GB for all packages: they rank the {DENSE_NODES} best only",
    )
    for missing in ranking.missing:
        line(console, f"left out: {missing}", style=SKIPPED)
    for agreement in ranking.agreements:
        if agreement.failure:
            line(console, agreement.failure, style=BAD)
    return ranking


def _show_replicas(console: Console) -> tuple[ReplicaTraining | None, str]:
    heading(console, "LeNet on handwritten digits, synchronous SGD on 1, 2 and 4 replicas")
    try:
        training = train_replicas()
    except MissingExtra as error:
        line(console, f"left out: {error}", style=SKIPPED)
        return None, str(error)
    console.print(tables.replicas_table(training))
    line(console, training.setting)
    line(console, f"difference: from the run on one replica; held if at most {training.allowed:.0e}")
    return training, ""
