"""The run of benchmarks in a pytest session of this process."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from pdlcheck.bench.experiments import experiments
from pdlcheck.bench.passes import merge_rows
from pdlcheck.benchmarking.follower import Follower, facts_of
from pdlcheck.benchmarking.selection import UsageError, select
from pdlcheck.report.files import why_not_writable
from pdlcheck.report.measured import machine_text, measured_table
from pdlcheck.report.progress import console_on_stdout
from pdlcheck.report.tables import BAD, GOOD, SKIPPED, count, heading, line, print_whole

__all__ = ["Plan", "UsageError", "run_benchmarks"]

_QUICK_S, _FULL_S = 0.05, 1.0  # for each timed function, in a pass


@dataclass(frozen=True)
class Plan:
    """The choices for one run of ``pdlcheck bench``.

    Args:
        suites: names of suites, or files of tests; empty means all suites.
        device: device of the tensors, ``cpu`` or ``cuda``.
        world: the world of the ranks; ``None`` chooses it by the device.
        ranks: numbers of ranks.
        full: larger inputs and more rounds.
        json: file for all rows.
        passes: number of passes, each in new processes.
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
        UsageError: a suite, the device, or the file is not available.
        FileNotFoundError: the suites are not installed.
        KeyboardInterrupt: the user pressed Ctrl-C. The rows measured so far are printed and written.
    """
    selection = select(plan.suites, plan.ranks, full=plan.full)
    world = _world(plan)
    _require_writable(plan.json)
    arguments = [*selection.arguments, "--pdl-world", world, "--pdl-rank-device", plan.device]
    arguments += ["--benchmark-max-time", str(_FULL_S if plan.full else _QUICK_S), "--benchmark-quiet"]
    start = time.perf_counter()
    with (
        selection.environment(),
        console_on_stdout() as progress,
        TemporaryDirectory(prefix="pdlcheck-bench-") as temporary,
    ):
        follower, saved = Follower(progress, plan.passes), Path(temporary, "run.json")
        arguments += [f"--benchmark-storage=file://{temporary}", f"--benchmark-json={saved}"]
        code = pytest.main(arguments, plugins=[follower])
        if code == pytest.ExitCode.USAGE_ERROR:
            raise UsageError("pytest refuses the settings of this project, and says why above")
        run = json.loads(saved.read_text()) if saved.exists() and saved.stat().st_size else {}
    if run:
        run["benchmarks"] = merge_rows(run["benchmarks"])
    if run and plan.json:
        plan.json.write_text(json.dumps(run, indent=1) + "\n")
    found = run.get("benchmarks", [])
    _show(console, plan, world, follower, found, time.perf_counter() - start)
    if follower.is_interrupted:
        raise KeyboardInterrupt
    return code == pytest.ExitCode.OK and (bool(found) or follower.is_silent)


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
    """Raise if the file cannot be written, before minutes of measurement are spent."""
    if path is not None and (why := why_not_writable(path)):
        raise UsageError(f"--json {path} cannot be written: {why}")


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
        line(console, "nothing was measured: every benchmark was skipped, or there is none", style=BAD)
    line(console, f"{count(len(rows), 'row')} in {seconds:.0f} s" + (f": {plan.json}" if plan.json else ""))
