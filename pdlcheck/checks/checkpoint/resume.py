"""The check that a resumed training continues as if it had not stopped."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pdlcheck.checks.checkpoint.causes import REPLICAS, find_cause
from pdlcheck.checks.checkpoint.events import further_stops
from pdlcheck.checks.checkpoint.own_files import require_own_files
from pdlcheck.checks.checkpoint.resized import require_resumes_on
from pdlcheck.checks.checkpoint.runs import (
    OF_NO_FUNCTION,
    Plan,
    Start,
    Trace,
    first_apart,
    resumed_run,
    run_to_save,
    straight_run,
    with_what_was_left,
)
from pdlcheck.checks.checkpoint.unsaved_state import NUMBERS, first_difference, is_no_state
from pdlcheck.checks.conditions import meet
from pdlcheck.checks.message import Place, case, failure, name_of, takes_world
from pdlcheck.checks.state import differing, digest, require_bits
from pdlcheck.errors import Inconclusive

__all__ = ["check_resume"]

_STOP = 3  # steps before saving
_SHORT_S = 0.25  # of the processor; a training of such length is stopped in further places
_FURTHER_S = 2.0  # after which no further stop begins


@takes_world
def check_resume(
    start: Start,
    world: Any,
    *,
    world_size: int = 2,
    saved_after: int | None = None,
    steps: int = 6,
    buffers: bool = True,
    resume_world_size: int | None = None,
    seed: int = 0,
) -> None:
    """Check that a resumed training continues bit for bit like a training without a stop.

    The training takes some steps, saves, loads into a new state of the program, and takes further steps. After each
    step and on each rank, weights and buffers must equal those of a training without a stop. At the end, the state of
    each object that the functions hold must be equal too.

    The resumed ranks start with other random numbers, so that a random state that is not restored shows. Saving must
    not change the training that continues after it. No two ranks may write one file; the check finds such files where
    each rank can save into a folder of its own. Ranks may rename equal files to one name.

    On a difference, the check restores state from the training without a stop, by experiment. Candidates are each
    object with a state that the functions reach (optimizer, scheduler, sampler, ...), the numbers of your objects,
    functions and containers, each random stream, and the gradients. The functions may reach them through helpers,
    containers or objects of yours. The likely cause names the candidates that make the training continue exactly.

    A tensor, or a plain dict, list or deque of tensors, is a state too, if the steps after saving change it. It is a
    log, and may differ, if its keys differ from those without a stop. This exception does not hold if its keys never
    change without a stop.

    Args:
        start: called on every rank; returns the model, ``step(i)``, ``save(path)`` and ``load(path)``. ``step(i)``
            takes training step i (0, 1, ...) on this rank with everything that belongs to it. ``save`` and ``load``
            write and read everything under a path, which ``save`` may make a folder.
        world: where the ranks run; they must see one file system.
        world_size: number of ranks.
        saved_after: steps before saving; use 2 or more, because momentum shows only then. ``None`` is 3. If the check
            passes then, it also tries stops within the second epoch, at the end of the first one and after the first
            step, where ``steps`` has them and the loaders of the functions show them. It tries only places of the same
            kind, such as ends of epochs, and only if steps take little time.
        steps: steps in all; use several after ``saved_after``, because an epoch may end or the learning rate may change
            there.
        buffers: whether to compare buffers too; False if each rank keeps statistics of its own data on purpose.
        resume_world_size: another number of ranks, which must resume from the same file, too. The training must not
            depend on the number of ranks: ``start`` makes the same whole model, ranks divide the same global batches,
            and no dropout draws. Numbers may differ by rounding.
        seed: rank r of the training without a stop draws from ``seed + r``.

    Raises:
        AssertionError: the resumed training differs, saving changes the training, or two ranks write one file. The
            message names the first step, rank, tensor and index that differ, and the state that was lost. If the
            weights are equal but another state is not, such as an average of weights, it names that state.
        Inconclusive: the training without a stop is not deterministic, or no parameter changes after saving. With
            ``resume_world_size``: it differs, and so does a training of so many ranks without a stop.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pdlcheck.primitives import load_checkpoint, save_checkpoint
        >>> from pdlcheck.worlds import get_world
        >>> def start():
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ...     def step(i):
        ...         optimizer.zero_grad()
        ...         model(torch.full((2, 4), i + 1.0)).square().mean().backward()
        ...         optimizer.step()
        ...     def save(path):
        ...         save_checkpoint(path, 3, model=model, optimizer=optimizer)
        ...     def load(path):
        ...         load_checkpoint(path / "step_000000000003.ckpt", model=model, optimizer=optimizer)
        ...     return model, step, save, load
        >>> check_resume(start, get_world("sim"))
    """
    __tracebackhide__ = True
    stop = min(_STOP, steps - 1) if saved_after is None else saved_after
    if not 0 <= stop < steps:
        raise ValueError(f"check_resume needs saved_after from 0 to below steps, got {stop} and {steps}")
    if resume_world_size is not None and (resume_world_size < 1 or resume_world_size == world_size):
        raise ValueError(
            "check_resume needs as resume_world_size another number of ranks than world_size, got "
            f"{resume_world_size} and {world_size}"
        )
    with tempfile.TemporaryDirectory(prefix="pdlcheck-resume-") as name:
        plan = Plan(stop, steps, str(Path(name) / "saved"), buffers, seed)
        straight = _check_stop(start, world, plan, world_size, widens=saved_after is None)
        courses = [trace.course for trace in straight if trace.course is not None]
        stops = [stop]
        if saved_after is None and max(trace.seconds for trace in straight) < _SHORT_S:
            began = time.monotonic()
            for further in further_stops(courses, stop):
                if time.monotonic() - began > _FURTHER_S:
                    break
                other = replace(plan, saved_after=further, file=str(Path(name) / f"after-{further}" / "saved"))
                outcome = _resumes(start, world, other, straight)
                if outcome is False:
                    with suppress(Inconclusive):
                        _check_stop(start, world, other, world_size)
                elif outcome:
                    stops.append(further)
        if resume_world_size is not None:
            facts = case(world, world_size, saved_after=stop, steps=steps, seed=seed)
            more = f"{facts} resume_world_size={resume_world_size}"
            require_resumes_on(name_of(start), start, plan, world, straight, resume_world_size, case=more)
    for course in courses:
        for each in stops:
            meet(course.conditions(each))


def _resumes(start: Start, world: Any, plan: Plan, straight: Sequence[Trace]) -> bool | None:
    """Return whether a training that stops elsewhere ends as without a stop; None if it cannot stop there."""
    folder, size = Path(plan.file).parent, len(straight)
    folder.mkdir()
    try:
        world.run(run_to_save, start, plan, folder, world_size=size)
        resumed: list[Trace] = world.run(resumed_run, start, plan, None, [], world_size=size)
    except Exception:  # a program may refuse to save in other places than those where it does
        return None
    ends = zip(resumed, straight, strict=True)
    return not any(differing([digest(mine.states[-1]), digest(wanted.states[-1])]) for mine, wanted in ends)


def _check_stop(start: Start, world: Any, plan: Plan, world_size: int, *, widens: bool = False) -> list[Trace]:
    """Check a training that stops once, and return the traces of the training without a stop."""
    __tracebackhide__ = True
    who, saved_after = name_of(start), plan.saved_after
    facts = case(world, world_size, saved_after=saved_after, steps=plan.steps, seed=plan.seed)
    straight: list[Trace] = world.run(straight_run, start, plan, False, False, widens, world_size=world_size)
    saved = world.run(straight_run, start, plan, True, world_size=world_size)
    _require_deterministic(who, straight, saved, saved_after)
    trouble = first_apart(saved, straight)
    if trouble is not None:
        torch_ = "the random numbers of torch"
        _raise(
            f"{who}: saving changes the training:",
            trouble,
            saved_after,
            (saved, straight),
            likely_cause="save draws random numbers or changes the state that it saves"
            if first_difference(saved[trouble[1]].left[torch_], straight[trouble[1]].left[torch_])
            else "save changes the state that it saves",
            case=facts,
        )
    resumed = world.run(resumed_run, start, plan, None, [], world_size=world_size)
    trouble = first_apart(resumed, straight)
    if trouble is not None:
        pair = with_what_was_left(start, plan, world, resumed, straight)
        cause, evidence = find_cause(start, plan, world, pair, trouble)
        _raise(
            f"{who}: resumed after step {saved_after},",
            trouble,
            saved_after,
            (resumed, straight),
            likely_cause=cause,
            evidence=evidence,
            case=facts,
        )

    def with_left() -> tuple[list[Trace], list[Trace]]:
        return with_what_was_left(start, plan, world, resumed, straight)

    _require_same_parts(who, resumed, straight, saved, with_left, facts)
    apart = Path(plan.file).parent / "apart"
    require_own_files(who, partial(run_to_save, start, plan), world, apart, world_size=world_size, case=facts)
    return straight


def _require_same_parts(
    who: str,
    resumed: Sequence[Trace],
    straight: Sequence[Trace],
    saved: Sequence[Trace],
    with_left: Callable[[], tuple[list[Trace], list[Trace]]],
    facts: str,
) -> None:
    """Check that the objects of the functions end in equal states.

    A part that differs between two runs without a stop does not count. ``with_left`` returns the resumed and the
    straight traces with their states after loading or saving. It runs the training again, so it is called only if a
    part differs.
    """
    __tracebackhide__ = True
    differ: list[dict[str, str]] = []
    for found, expected, again in zip(resumed, straight, saved, strict=True):
        kept = [part for part in expected.end if part not in OF_NO_FUNCTION and not part.startswith(NUMBERS)]
        kept = [part for part in kept if not first_difference(again.end.get(part), expected.end[part])]
        texts = {part: first_difference(found.end.get(part), expected.end[part], part) for part in kept}
        differ.append({part: text for part, text in texts.items() if text})
    if not any(differ):
        return
    resumed, straight = with_left()
    for rank, (found, expected, told) in enumerate(zip(resumed, straight, differ, strict=True)):
        runs = {part: [(trace.left.get(part), trace.end.get(part)) for trace in (found, expected)] for part in told}
        lost = [part for part, pair in runs.items() if not is_no_state(*pair)]
        if lost:
            own = _whose(lost[0], found, straight, rank)
            raise failure(
                f"{who}: resumed, rank {rank} ends with the weights of a run without a stop, but {told[lost[0]]}",
                likely_cause=f"not saved, or not loaded: {', '.join(lost)}, or what changes them"
                if own is None
                else f"{lost[0]} is what rank {own} held: each rank's own was not saved{REPLICAS}",
                case=facts,
            )


def _whose(part: str, found: Trace, straight: Sequence[Trace], rank: int) -> int | None:
    """Return the other rank whose state was loaded on ``rank``; None if ``rank`` held it too, or no rank did."""
    loaded = found.left.get(part)
    if not first_difference(loaded, straight[rank].left.get(part)):
        return None
    others = (other for other in range(len(straight)) if other != rank)
    return next((o for o in others if not first_difference(loaded, straight[o].left.get(part))), None)


def _require_deterministic(who: str, straight: Sequence[Trace], saved: Sequence[Trace], saved_after: int) -> None:
    first = [Trace(trace.states[:1], {}, {}) for trace in straight]
    trouble = first_apart([Trace(trace.states[:1], {}, {}) for trace in saved], first)
    if trouble is not None:
        raise Inconclusive(
            f"{who}: two straight runs differ after step {saved_after}, on rank {trouble[1]} in {trouble[2]}: "
            "the training is not deterministic, or saving changes the model"
        )
    for trace in straight:
        names = differing([digest(trace.states[0]), digest(trace.states[-1])])
        if not any(name.startswith("parameter") for name in names):
            raise Inconclusive(f"{who}: no parameter changed after step {saved_after}, the check saw nothing")


def _raise(
    head: str,
    trouble: tuple[int, int, str],
    saved_after: int,
    pair: tuple[Sequence[Trace], Sequence[Trace]],
    **more: Any,
) -> None:
    __tracebackhide__ = True
    taken, rank, name = trouble
    when = "before a step was taken" if taken == 0 else f"after step {saved_after + taken}"
    found, expected = (traces[rank].states[taken].get(name) for traces in pair)
    require_bits(
        f"{head} rank {rank} {when}",
        name,
        (found, expected),
        "without a stop",
        Place(rank, step=saved_after + taken),
        **more,
    )
