"""Runs the benchmark suites in one pytest session of this process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from pdlcheck.bench.experiments import experiments
from pdlcheck.bench.passes import merge_rows
from pdlcheck.benchmarking.follower import Follower, facts_of
from pdlcheck.report.files import why_not_writable
from pdlcheck.report.measured import machine_text, measured_table
from pdlcheck.report.progress import console_on_stdout
from pdlcheck.report.tables import BAD, GOOD, SKIPPED, count, heading, line, print_whole

__all__ = ["Plan", "UsageError", "run_benchmarks", "suite_names"]

SUITES = "pdlcheck.benchmarks"
_QUICK_S, _FULL_S = 0.05, 1.0  # for each function that is timed, in a pass
_QUICK_ROUNDS = 3  # at least


class UsageError(Exception):
    """The arguments cannot be carried out; the message says which, and what can be."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        suites: names of suites; empty means all of them.
        device: of the tensors, ``cpu`` or ``cuda``.
        world: where ranks run; ``None`` chooses by the device.
        ranks: numbers of ranks.
        full: larger inputs and more rounds.
        json: file for all rows.
        passes: how often to run everything, each time in new processes.
    """

    suites: tuple[str, ...] = ()
    device: str = "cpu"
    world: str | None = None
    ranks: tuple[int, ...] = (2,)
    full: bool = False
    json: Path | None = None
    passes: int = 3


def run_benchmarks(console: Console, plan: Plan) -> bool:
    """Run the suites and print their rows; return whether every result was right.

    Raises:
        UsageError: a suite, the device, or the file cannot be had.
        FileNotFoundError: the suites are not installed.
    """
    folder = _folder()
    files = _files(folder, plan.suites)
    world = _world(plan)
    _require_writable(plan.json)
    arguments = [*files, "--rootdir", str(folder.parent), "--confcutdir", str(folder), "-c", os.devnull]
    for plugin in ("no:cacheprovider", "pdlcheck.plugin", "pytest_benchmark.plugin"):
        arguments += ["-p", plugin]
    arguments += ["--pdl-world", world, "--pdl-rank-device", plan.device, "--ranks", ",".join(map(str, plan.ranks))]
    arguments += ["--benchmark-max-time", str(_FULL_S if plan.full else _QUICK_S)]
    arguments += ["--benchmark-quiet", "-o", "pdlcheck_markers=gpu"]
    arguments += ["--full"] if plan.full else [f"--benchmark-min-rounds={_QUICK_ROUNDS}"]
    start, held = time.perf_counter(), True
    with _environment(), console_on_stdout() as progress, TemporaryDirectory(prefix="pdlcheck-bench-") as temporary:
        follower = Follower(progress, plan.passes)
        saved = [Path(temporary, f"{number}.json") for number in range(plan.passes)]
        arguments += [f"--benchmark-storage=file://{temporary}"]
        for file in saved:
            code = pytest.main([*arguments, f"--benchmark-json={file}"], plugins=[follower])
            held = held and code == pytest.ExitCode.OK
            if code == pytest.ExitCode.INTERRUPTED:
                raise KeyboardInterrupt
        run = _merged([json.loads(file.read_text()) for file in saved if file.exists() and file.stat().st_size])
    if run and plan.json:
        plan.json.write_text(json.dumps(run, indent=1) + "\n")
    found = run.get("benchmarks", [])
    _show(console, plan, world, follower, found, time.perf_counter() - start)
    return held and (bool(found) or follower.is_silent)


def suite_names() -> list[str]:
    """The names of all suites, sorted.

    Raises:
        FileNotFoundError: the suites are not installed.
    """
    return sorted(path.stem.removeprefix("bench_") for path in _folder().glob("bench_*.py"))


def _folder() -> Path:
    found = find_spec(SUITES)
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(
            f"package {SUITES} is not here: pdlcheck was imported without being installed; "
            "in the folder of its pyproject.toml, run: pip install -e ."
        )
    return Path(found.submodule_search_locations[0])


def _files(folder: Path, suites: Sequence[str]) -> list[str]:
    known = suite_names()
    for name in suites:
        if name not in known:
            raise UsageError(f"there is no suite {name!r}; choose from {', '.join(known)}")
    return [str(folder / f"bench_{name}.py") for name in suites or known]


def _world(plan: Plan) -> str:
    if plan.device == "cpu":
        if plan.world == "nccl":
            raise UsageError("--world nccl has CUDA devices; pass --device cuda")
        return plan.world or "gloo"
    import torch

    devices = torch.cuda.device_count()
    if not devices:
        raise UsageError(f"--device cuda: torch {torch.__version__} finds no CUDA device here; see pdlcheck doctor")
    return plan.world or ("nccl" if devices >= max(plan.ranks) else "gloo")


def _require_writable(path: Path | None) -> None:
    """Before minutes of measuring, not after."""
    if path is not None and (why := why_not_writable(path)):
        raise UsageError(f"--json {path} cannot be written: {why}")


def _merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last pass's machine, and the rows of all passes."""
    if not runs:
        return {}
    return {**runs[-1], "benchmarks": merge_rows([run["benchmarks"] for run in runs])}


def _show(
    console: Console, plan: Plan, world: str, follower: Follower, found: Sequence[dict[str, Any]], seconds: float
) -> None:
    if follower.is_silent:  # another process of a launch shows the rows
        return
    rows = [(row["name"], facts_of(row)) for row in found]
    heading(console, f"benchmarks on {world}, {plan.device}")
    line(console, machine_text())
    if rows:
        print_whole(console, measured_table(rows))
    for text in [facts["row"] for _, facts in rows if "row" in facts]:
        line(console, text)
    for experiment in experiments(rows):
        console.print()
        words, style = {True: ("holds", GOOD), False: ("does not hold", BAD), None: ("", "")}[experiment.held]
        line(console, f"{experiment.title}{words and f': the model {words}'}", style=style)
        line(console, experiment.sentence)
    for reason, number in follower.skipped.items():
        line(console, f"{number} skipped: {reason}", style=SKIPPED)
    for title, text in follower.failures:
        console.print()
        line(console, f"FAILS  {title}", style=BAD)
        console.print(Text(text))
    console.print()
    if not rows and not follower.failures:
        line(console, "nothing was measured: every benchmark was skipped", style=BAD)
    line(console, f"{count(len(rows), 'row')} in {seconds:.0f} s" + (f": {plan.json}" if plan.json else ""))


@contextmanager
def _environment() -> Iterator[None]:
    """The user's own settings of pytest are not meant for this session; in a worker of xdist it would not measure."""
    names = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_XDIST_WORKER")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
