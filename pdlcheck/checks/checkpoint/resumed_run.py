"""The check of a program that owns its loop and its checkpoints: two whole runs, one of them with a stop."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdlcheck.checks.checkpoint.resumed_run_causes import cause_of, cause_of_steps
from pdlcheck.checks.checkpoint.step_records import GRADIENTS, RANDOM, Kept, Recorder
from pdlcheck.checks.checkpoint.traced_runs import (
    Apart,
    Run,
    Traced,
    first_apart_in_steps,
    first_apart_in_the_end,
    traced_run,
)
from pdlcheck.checks.conditions import meet
from pdlcheck.checks.message import Place, case, failure, name_of, takes_world
from pdlcheck.checks.state import require_bits
from pdlcheck.errors import Inconclusive

__all__ = ["check_resumed_run"]


@takes_world
def check_resumed_run(run: Run, world: Any, *, world_size: int = 2, stop_after: int = 3, seed: int = 0) -> None:
    """Check that a program that is stopped and run again ends bit for bit like a run without a stop.

    The check is for a program that owns its loop and its checkpoints, such as ``transformers.Trainer`` or Lightning's
    Trainer. It runs the program without a stop in one folder. In another folder, it runs the program until it stops,
    and then again. Use :func:`check_resume` for a program with a step, a save and a load of its own.

    Each rank starts the second run with other random numbers. On a difference, the optimizer steps of both runs are
    compared: the weights, data, random numbers, settings and optimizer state of each step. The check then puts some
    of these back from the run without a stop. The likely cause names those that make the training end alike.

    Args:
        run: called as ``run(folder, stop_after)`` on every rank; all ranks get the same folder. It trains, and resumes
            from the checkpoint in ``folder`` if there is one. With a number, it saves and ends after so many steps,
            counted from the start of the training, but with the same schedule as a longer run. With None it goes on to
            its end. It returns a dict of what must be equal: models, optimizers and other objects with a
            ``state_dict``, tensors, and lists of numbers such as losses. Of a list, a resumed run may have the end
            only.
        world: where the ranks run; they must see one file system.
        world_size: number of ranks.
        stop_after: the steps before the stop; use 2 or more, because momentum shows only then.
        seed: rank r of the run without a stop draws from ``seed + r``.

    Raises:
        AssertionError: the second run ends elsewhere, or takes another number of steps than were left. The message
            names the rank, the tensor and the first step that differs, and the state that was lost.
        Inconclusive: the run does not stop, or the runs differ before the stop.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch import nn
        >>> from pdlcheck.worlds import get_world
        >>> def run(folder, stop_after):
        ...     torch.manual_seed(0)
        ...     model, file = nn.Linear(4, 1), folder / "checkpoint.pt"
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ...     first = 0
        ...     if file.exists():
        ...         first, weights, state = torch.load(file)
        ...         model.load_state_dict(weights)
        ...         optimizer.load_state_dict(state)
        ...     for step in range(first, 6 if stop_after is None else stop_after):
        ...         optimizer.zero_grad()
        ...         model(torch.full((2, 4), step + 1.0)).square().mean().backward()
        ...         optimizer.step()
        ...     if dist.get_rank() == 0:
        ...         torch.save((step + 1, model.state_dict(), optimizer.state_dict()), file)
        ...     dist.barrier()
        ...     return {"model": model}
        >>> check_resumed_run(run, get_world("sim"))
    """
    __tracebackhide__ = True
    if stop_after < 1:
        raise ValueError(f"check_resumed_run needs a stop after 1 step or more, got {stop_after}")
    facts = case(world, world_size, stop_after=stop_after, seed=seed)
    who = name_of(run)
    with tempfile.TemporaryDirectory(prefix="pdlcheck-resumed-") as name:
        runs = Runs(run, world, world_size, Path(name), stop_after, seed)
        stopped = runs.stopped()
        taken = len(stopped[0].steps)
        whole = runs.whole(taken)
        _require_same_before(who, stopped, whole, stop_after)
        try:
            resumed = runs.again()
        except Exception as error:
            error.add_note(f"while check_resumed_run ran {who} again, after a stop after {stop_after} steps")
            raise
        _require_left_steps(who, taken, whole, resumed, facts)
        trouble = first_apart_in_the_end(resumed, whole)
        if trouble is None:
            meet(_conditions(taken, whole))
            return
        apart = first_apart_in_steps(resumed, whole, taken)
        cause, evidence = cause_of(apart, (resumed, whole), taken, seed, runs.again)
        _raise(
            f"{who}: stopped after step {stop_after} and run again,",
            trouble,
            (resumed, whole),
            None if apart is None else Apart(taken + apart.number + 1, apart.rank, apart.names),
            likely_cause=cause,
            evidence=evidence,
            case=facts,
        )


class Runs:
    """The runs of one program, each in a folder of its own."""

    def __init__(self, run: Run, world: Any, world_size: int, folder: Path, stop_after: int, seed: int) -> None:
        """Use new folders below ``folder``."""
        self._run, self._world, self._world_size = run, world, world_size
        self._folder, self._stop_after, self._seed = folder, stop_after, seed

    def stopped(self) -> list[Traced]:
        """Return the run that stops; it leaves its checkpoint to :meth:`again`."""
        return self._traced(self._new("stopped"), self._stop_after, self._seed, Recorder())

    def whole(self, taken: int) -> list[Traced]:
        """Return the run without a stop, with the values of the step after ``taken`` steps."""
        return self._traced(self._new("whole"), None, self._seed, Recorder(keep_from=taken))

    def again(
        self, *, names: tuple[str, ...] = (), kept: Sequence[Kept] = (), seed: int | None = None, fresh: bool = False
    ) -> list[Traced]:
        """Run again what has stopped, and go on to the end.

        Args:
            names: what to put back.
            kept: the values of each rank to put back.
            seed: of the random streams; by default another one than that of the run before.
            fresh: whether to run without a checkpoint, and to stop.
        """
        folder = self._new(f"again-{len(list(self._folder.iterdir()))}")
        if not fresh:
            shutil.copytree(self._folder / "stopped", folder, dirs_exist_ok=True)
        seed = self._seed + 7919 if seed is None else seed
        return self._traced(folder, self._stop_after if fresh else None, seed, Recorder(names=names), kept)

    def _new(self, name: str) -> Path:
        (self._folder / name).mkdir()
        return self._folder / name

    def _traced(self, *args: Any) -> list[Traced]:
        traces: list[Traced] = self._world.run(traced_run, self._run, *args, world_size=self._world_size)
        return traces


def _require_same_before(who: str, stopped: Sequence[Traced], whole: Sequence[Traced], stop_after: int) -> None:
    """Check that the run that stops takes the first steps of the run without a stop."""
    taken, steps = len(stopped[0].steps), len(whole[0].steps)
    if steps and not 0 < taken < steps:
        raise Inconclusive(
            f"{who}: with stop_after={stop_after} it takes {taken} optimizer steps, without a stop {steps}: it must "
            "stop before its end"
        )
    for rank, (mine, wanted) in enumerate(zip(stopped, whole, strict=True)):
        for number, (one, two) in enumerate(zip(mine.steps, wanted.steps, strict=False), start=1):
            names = [name for name in one.differing(two) if name != RANDOM]
            if names:
                raise Inconclusive(
                    f"{who}: the run that stops differs from the run without a stop before that, in step {number} on "
                    f"rank {rank}: {', '.join(names)}. The training is not deterministic, or a stop changes its "
                    "schedule: stop it without making it shorter"
                )


def _require_left_steps(who: str, taken: int, whole: Sequence[Traced], resumed: Sequence[Traced], facts: str) -> None:
    """Check that the second run takes the steps that were left."""
    __tracebackhide__ = True
    for rank, (mine, wanted) in enumerate(zip(resumed, whole, strict=True)):
        left = len(wanted.steps) - taken
        if len(mine.steps) != left:
            raise failure(
                f"{who}: stopped after {taken} of {len(wanted.steps)} optimizer steps and run again, rank {rank} takes "
                f"{len(mine.steps)} steps, {left} were left",
                Place(rank),
                likely_cause=cause_of_steps(mine, wanted, taken),
                case=facts,
            )


def _conditions(taken: int, whole: Sequence[Traced]) -> dict[str, bool]:
    """Return the conditions of learning rates, if there is a schedule, and whether the run has met them."""
    rates = [[group.get("lr") for group in one.settings] for one in whole[0].steps]
    if not any("initial_lr" in group for one in whole[0].steps for group in one.settings):
        return {}
    return {
        "a change of the learning rate before the save": any(one != rates[0] for one in rates[: taken + 1]),
        "a change of the learning rate after the save": any(one != rates[taken] for one in rates[taken:]),
    }


def _raise(
    head: str,
    trouble: tuple[int, str, str],
    pair: tuple[Sequence[Traced], Sequence[Traced]],
    first: Apart | None,
    **more: object,
) -> None:
    __tracebackhide__ = True
    rank, returned, what = trouble
    if first is not None:
        names = [name for name in first.names if name != RANDOM or GRADIENTS in first.names]
        names = names if len(names) < 3 else [names[0], f"{len(names) - 1} more"]
        more = {"first_difference": f"step {first.number} of rank {first.rank}: {' and '.join(names)}", **more}
    place = Place(rank, step=None if first is None else first.number)
    if returned not in pair[1][rank].models:
        raise failure(f"{head} rank {rank} ends with the {returned} of another training: {what}", place, **more)
    found, expected = (traces[rank].models[returned].get(what) for traces in pair)
    require_bits(f"{head} rank {rank}", what, (found, expected), "without a stop", place, **more)
