"""One call of ``pdlcheck run``: the program on the ranks of a world, under one schedule or several."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdlcheck.errors import Inconclusive, WorldUnavailable
from pdlcheck.scripts.counts import PROGRESS, listen
from pdlcheck.scripts.finding import Finding
from pdlcheck.scripts.imports import imported_packages
from pdlcheck.scripts.launchers import NotALauncher, RanksFailed, Starting, has_launcher, start_ranks
from pdlcheck.scripts.lines import Lines
from pdlcheck.scripts.on_rank import call_on_rank, import_and_call, run_on_rank, simulated_output
from pdlcheck.scripts.plan import Plan
from pdlcheck.scripts.program import ProgramExit
from pdlcheck.scripts.progress import Progress
from pdlcheck.scripts.world_sizes import Results, difference
from pdlcheck.worlds.journal import notes
from pdlcheck.worlds.outcome import results
from pdlcheck.worlds.program import import_known_globals, program_modules
from pdlcheck.worlds.registry import get_world, is_simulated

__all__ = ["run_program"]


def run_program(plan: Plan, progress: Progress) -> Finding:
    """Run the program as planned, and return what that has shown.

    Raises:
        ValueError: an option does not fit.
        WorldUnavailable: the world cannot run on this machine.
    """
    lines = Lines(progress.write)
    if is_simulated(plan.world):
        import_known_globals(imported_packages(plan.program))
    try:
        if plan.sizes:
            if has_launcher(plan.program):
                own = f"{plan.program.target} starts its ranks itself"
                raise ValueError(f"--compare-world-sizes chooses the number of ranks, and {own}")
            return _on_sizes(plan, progress)
        if has_launcher(plan.program):
            with suppress(NotALauncher):
                return _as_launcher(plan, progress, lines)
        return _Run(plan, progress, lines).finding()
    finally:
        lines.end()


def _on_sizes(plan: Plan, progress: Progress) -> Finding:
    """Run the program on several numbers of ranks, and compare what it prints and saves."""
    of_size: dict[int, Results] = {}
    finding = Finding(plan.world, plan.ranks)
    for size in plan.sizes:
        results = of_size[size] = Results()

        def write(stream: str, line: str, results: Results = results) -> None:
            progress.write(stream, line)
            if stream == "out" and line.startswith("[rank 0] "):
                results.read(line.removeprefix("[rank 0] "))

        lines = Lines(write)
        finding = _Run(replace(plan, world_size=size), progress, lines).finding()
        lines.end()
        if not finding.held:
            return finding
        results.saved = {name: tensor for one in reversed(finding.counts) for name, tensor in one.saved.items()}
        first = plan.sizes[0]
        if results.is_empty:
            finding.error = Inconclusive("nothing was compared: rank 0 printed no loss, and no rank called torch.save")
            return finding
        if size != first and (error := difference(first, of_size[first], size, results)) is not None:
            finding.error, finding.replay = error, plan.replay(plan.schedule or f"random:{plan.seed}")
            return finding
    finding.notes.append(f"losses and weights agree on {', '.join(map(str, plan.sizes))} ranks")
    return finding


def _as_launcher(plan: Plan, progress: Progress, lines: Lines) -> Finding:
    """Run the program, and the ranks that it starts."""
    findings: list[Finding] = []
    refused: list[Exception] = []

    def start(starting: Starting) -> None:
        try:
            if starting.world_size < 1:
                cure = "" if plan.cuda_as_cpu else "; if it starts one for each CUDA device, use --cuda-as-cpu and -n"
                raise ValueError(f"{plan.program.target} starts {starting.world_size} ranks{cure}")
            finding = _Run(plan, progress, lines, starting).finding()
        except (ValueError, WorldUnavailable) as error:
            refused.append(error)
            raise RanksFailed from None
        findings.append(finding)
        if plan.world_size not in (None, starting.world_size):
            own = f"the program started {starting.world_size} ranks itself"
            finding.notes.append(f"{own}: -n {plan.world_size} is not used")
        if not finding.held:
            raise RanksFailed

    try:
        start_ranks(plan.program, start, plan.ranks if plan.cuda_as_cpu else 0)
    except RanksFailed:
        if refused:
            raise refused[0] from None
    except SystemExit as exit_:
        words = f"the program ended with exit code {exit_.code} before it had started all ranks"
        return Finding(plan.world, 0, error=ProgramExit(words, rank=0, code=exit_.code))
    except Exception as error:
        return Finding(plan.world, 0, error=error)
    failed = [one for one in findings if not one.held]
    return (failed or findings or [Finding(plan.world, 0)])[-1]


class _Run:
    """The program, or what it has started, on the ranks of a world.

    Args:
        plan: the settings.
        progress: shows how far the ranks are.
        lines: takes the output of the ranks.
        starting: what the program has started; None for the program itself.
    """

    def __init__(self, plan: Plan, progress: Progress, lines: Lines, starting: Starting | None = None) -> None:
        self._plan, self._progress, self._lines = plan, progress, lines
        self._ranks = plan.ranks if starting is None else starting.world_size
        self._options = plan.options()
        self._call: tuple[Callable[..., Any], tuple[Any, ...]] = (run_on_rank, (plan.program, bool(plan.sizes)))
        if starting is not None and starting.program is not None:
            self._call = run_on_rank, (starting.program,)
        elif starting is not None and starting.anew:
            self._call = import_and_call, (plan.program, [pickle.dumps(call) for call in starting.calls])
        elif starting is not None:
            self._call = call_on_rank, (starting.calls,)
            if is_simulated(plan.world):
                self._options["own_globals"] = (*plan.own_globals, *program_modules())

    def finding(self) -> Finding:
        """Run it under the schedules of the plan."""
        finding = Finding(self._plan.world, self._ranks, runs=self._plan.schedules)
        if self._plan.schedules > 1:
            self._search(finding)
        else:
            self._once(finding)
        return finding

    def _once(self, finding: Finding) -> None:
        world = get_world(self._plan.world, **self._options)
        world.check()
        try:
            with self._open(world, self._lines) as ranks:
                try:
                    finding.counts = results(ranks.outcomes(self._call[0], *self._call[1]))
                except Exception as error:
                    finding.error = error
                    finding.replay = self._plan.replay(str(getattr(world, "schedule", "")))
                finding.notes += self._pictures(world)
        finally:
            world.close()

    def _search(self, finding: Finding) -> None:
        """Search for a schedule under which the program fails. Only the output of the first run is shown."""
        from pdlcheck.worlds.simulated.schedules.search import search

        def run(schedule: Any) -> BaseException | None:
            self._progress.schedule += 1
            lines = self._lines if self._progress.schedule == 1 else Lines(lambda *_: None)
            world = get_world(self._plan.world, **self._options | {"schedule": schedule})
            try:
                with self._open(world, lines) as ranks:
                    finding.counts = results(ranks.outcomes(self._call[0], *self._call[1]))
            except Exception as error:
                return error
            finally:
                world.close()
            return None

        failure = search(run, self._plan.schedules)
        if failure is not None:
            finding.error, finding.runs = failure.error, failure.runs
            finding.replay = self._plan.replay(str(failure.replay))
            finding.notes.append(f"found under schedule {failure.runs} of {self._plan.schedules}")

    @contextmanager
    def _open(self, world: Any, lines: Lines) -> Iterator[Any]:
        """Open ranks, without a process group, whose output and progress is shown."""
        with ExitStack() as stack:
            ranks = stack.enter_context(world.open(self._ranks))
            if not hasattr(ranks, "leave_group"):
                raise ValueError(f"ranks of the world {world.name} always have a process group, which a script makes")
            ranks.leave_group()
            if world.shares_process:
                stack.enter_context(simulated_output(lines))
                stack.enter_context(listen(self._progress.tell))
            else:
                ranks.read_with(_reader(self._progress, lines), live=True)
                stack.callback(ranks.read_with, None)
            yield ranks

    def _pictures(self, world: Any) -> list[str]:
        folder = self._plan.timeline
        if folder is None:
            return []
        folder.mkdir(parents=True, exist_ok=True)
        name = Path(self._plan.program.target).stem
        return [f"timeline: {world.timeline.save(folder / f'{name}{suffix}')}" for suffix in (".svg", ".json")]


def _reader(progress: Progress, lines: Lines) -> Callable[[Any], None]:
    def read(written: Any) -> None:
        lines.add(written.rank, "out", written.out)
        lines.add(written.rank, "err", written.err)
        for kind, value in notes(written.journal):
            if kind == PROGRESS:
                progress.tell(written.rank, *value)

    return read
