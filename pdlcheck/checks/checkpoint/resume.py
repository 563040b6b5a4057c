"""Training that is resumed goes on as if it had not stopped."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from pdlcheck.checks.checkpoint.lost import (
    IN_CONTAINERS,
    NUMBERS,
    STREAMS,
    Gradients,
    first_difference,
    first_pass_draws_elsewhere,
    is_no_state,
    loaders_that_draw,
    numbers_of,
    parts_of,
    put_back,
    seed_streams,
    states_of,
)
from pdlcheck.checks.checkpoint.own_files import require_own_files
from pdlcheck.checks.message import case, failure, made_by_start, name_of, takes_world
from pdlcheck.checks.state import State, differing, digest, require_bits, state_of
from pdlcheck.errors import Inconclusive

__all__ = ["Start", "check_resume"]

Start = Callable[[], tuple[nn.Module, Callable[[int], object], Callable[[Path], object], Callable[[Path], object]]]

_MADE = ("model", "step", "save", "load")

_ONLY_BUFFERS = (
    "; only buffers differ, parameters are alike: right only for statistics of a rank's own data, which buffers=False "
    "accepts"
)
_GRADIENTS = "the gradients of the model"
_OWN = {*STREAMS, _GRADIENTS}  # what no function holds
_REPLICAS = (
    "; where ranks are meant to hold the same, they differed before saving: check_replicas_in_sync says since when"
)
_PASS = "the seed that a DataLoader draws from the random numbers of torch when a pass begins"
_ONE_MORE_PASS = (
    f"{_PASS}: one more begins after loading; restore them once the iterator is there, or give the loader a generator "
    "of its own"
)
_STEPS = "what the steps before leave behind, such as the position in an iterator over the data"


@takes_world
def check_resume(
    start: Start,
    world: Any,
    *,
    world_size: int = 2,
    saved_after: int = 3,
    steps: int = 6,
    buffers: bool = True,
    seed: int = 0,
) -> None:
    """Training for some steps, saving, loading in a new state of the program and training on must give, after each
    step and on each rank, bit for bit the weights and buffers of training that never stopped, and in the end the state
    of each thing that the functions hold.

    The resumed ranks start under other random numbers, so that what is not restored shows. Saving must not change the
    training that goes on after it either.

    Args:
        start: called on every rank; returns the model, ``step(i)``, which takes training step i (0, 1, ...) on this
            rank with everything that belongs to it, ``save(path)`` and ``load(path)``, which write and read everything
            under a path, a folder that ``save`` may make.
        world: where the ranks run; they must see one file system.
        world_size: number of ranks.
        saved_after: steps before saving; 2 or more, as momentum shows only then.
        steps: in all; several after ``saved_after``, as an epoch may end or a learning rate change there.
        buffers: compare buffers too; False where each rank keeps statistics of its own data by intention.
        seed: rank r of the straight run draws from ``seed + r``.

    Raises:
        AssertionError: names the first step, rank, tensor and index that differ, and what was lost: each thing with a
            state that the functions reach (optimizer, scheduler, sampler, ...), by helpers, containers or objects of
            yours, the numbers of such an object, as its epoch, of functions and in containers, each random stream and
            the gradients are put back from the straight run by experiment, and the likely cause is what makes the
            training go on exactly. Where the weights do, but not such a state, such as that of an average of weights,
            names that. A tensor, or a plain dict, list or deque of tensors, is one too, if the steps after saving
            change it; with other entries than without a stop it is a log, unless it had the same ones all the time
            without.
            Or: two ranks write one file, which shows where each can save into a folder of its own. They may rename the
            same content to one name.
        Inconclusive: the straight run is not deterministic, or no parameter changes after saving.

    Example:
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
    if not 0 <= saved_after < steps:
        raise ValueError(f"check_resume needs saved_after from 0 to below steps, got {saved_after} and {steps}")
    facts = case(world, world_size, saved_after=saved_after, steps=steps, seed=seed)
    who = name_of(start)
    with tempfile.TemporaryDirectory(prefix="pdlcheck-resume-") as name:
        file = Path(name) / "saved"
        plan = Plan(saved_after, steps, str(file), buffers, seed)
        straight = world.run(_straight, start, plan, False, world_size=world_size)
        saved = world.run(_straight, start, plan, True, world_size=world_size)
        _require_deterministic(who, straight, saved, saved_after)
        trouble = _first(saved, straight)
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
        resumed = world.run(_resumed, start, plan, None, [], world_size=world_size)
        trouble = _first(resumed, straight)
        if trouble is None:
            _require_same_parts(who, resumed, straight, saved, facts)
            apart = Path(name) / "apart"
            save = partial(_save_under, start, plan)
            require_own_files(who, save, world, apart, world_size=world_size, case=facts)
            return
        cause, evidence = _cause(start, plan, world, (resumed, straight), trouble)
        _raise(
            f"{who}: resumed after step {saved_after},",
            trouble,
            saved_after,
            (resumed, straight),
            likely_cause=cause,
            evidence=evidence,
            case=facts,
        )


@dataclass(frozen=True)
class Plan:
    """Steps before saving, steps in all, where the file is, whether buffers are compared, and the seed."""

    saved_after: int
    steps: int
    file: str
    buffers: bool
    seed: int


@dataclass(frozen=True)
class Trace:
    """What a rank held after saving or loading and after each further step.

    All else that has a state is in ``left`` after saving or loading, and in ``end`` after the last step. ``loaders``:
    how many draw seeds from the random numbers of torch.
    """

    states: list[State]
    left: dict[str, Any]
    end: dict[str, Any]
    loaders: int = 0


def _straight(start: Start, plan: Plan, saves: bool) -> Trace:
    seed_streams(plan.seed + dist.get_rank())
    model, step, save, load = made_by_start(start(), *_MADE)
    for i in range(plan.saved_after):
        step(i)
    if saves:
        save(Path(plan.file))
    left = states_of(_parts(model, step, save, load))
    return Trace(_go_on(model, step, plan), left, states_of(_parts(model, step, save, load), buffers=plan.buffers))


def _save_under(start: Start, plan: Plan, folder: Path) -> None:
    seed_streams(plan.seed + dist.get_rank())
    _, step, save, _ = made_by_start(start(), *_MADE)
    for i in range(plan.saved_after):
        step(i)
    save(folder / Path(plan.file).name)


def _resumed(start: Start, plan: Plan, straight: list[dict[str, Any]] | None, names: list[str]) -> Trace:
    seed_streams(plan.seed + 7919 + dist.get_rank())
    model, step, save, load = made_by_start(start(), *_MADE)
    if _STEPS in names:
        for i in range(plan.saved_after):
            step(i)
    load(Path(plan.file))
    parts = _parts(model, step, save, load)
    if straight is not None:
        put_back(parts, straight[dist.get_rank()], [name for name in names if name not in (_STEPS, _PASS)])
    left, loaders = states_of(parts), loaders_that_draw((step, save, load))
    with first_pass_draws_elsewhere(loaders if _PASS in names else []) as first_step_is_over:
        states = _go_on(model, step, plan, first_step_is_over)
    return Trace(states, left, states_of(_parts(model, step, save, load), buffers=plan.buffers), len(loaders))


def _parts(model: nn.Module, *functions: Callable[..., object]) -> dict[str, Any]:
    return {_GRADIENTS: Gradients(model), **numbers_of(functions), **parts_of(model, functions)}


def _go_on(
    model: nn.Module, step: Callable[[int], object], plan: Plan, after_a_step: Callable[[], object] = lambda: None
) -> list[State]:
    states = [state_of(model, buffers=plan.buffers)]
    for i in range(plan.saved_after, plan.steps):
        step(i)
        after_a_step()
        states.append(state_of(model, buffers=plan.buffers))
    return states


def _first(found: Sequence[Trace], expected: Sequence[Trace]) -> tuple[int, int, str] | None:
    """The first step after saving, rank and tensor that differ."""
    for taken in range(len(expected[0].states)):
        for rank, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
            names = differing([digest(mine.states[taken]), digest(wanted.states[taken])])
            if names:
                return taken, rank, names[0]
    return None


def _require_same_parts(
    who: str, resumed: Sequence[Trace], straight: Sequence[Trace], saved: Sequence[Trace], facts: str
) -> None:
    """The states of what the functions hold, but for those that differ without a stop too."""
    __tracebackhide__ = True
    for rank, (found, expected, again) in enumerate(zip(resumed, straight, saved, strict=True)):
        kept = [part for part in expected.end if part not in _OWN and not part.startswith(NUMBERS)]
        kept = [part for part in kept if not first_difference(again.end.get(part), expected.end[part])]
        runs = {part: [(trace.left.get(part), trace.end.get(part)) for trace in (found, expected)] for part in kept}
        kept = [part for part, pair in runs.items() if not is_no_state(*pair)]
        texts = {part: first_difference(found.end.get(part), expected.end[part], part) for part in kept}
        lost = [part for part in kept if texts[part]]
        if lost:
            own = _whose(lost[0], found, straight, rank)
            raise failure(
                f"{who}: resumed, rank {rank} ends with the weights of a run without a stop, but {texts[lost[0]]}",
                likely_cause=f"not saved, or not loaded: {', '.join(lost)}, or what changes them"
                if own is None
                else f"{lost[0]} is what rank {own} held: each rank's own was not saved{_REPLICAS}",
                case=facts,
            )


def _whose(part: str, found: Trace, straight: Sequence[Trace], rank: int) -> int | None:
    """The other rank whose state was loaded on ``rank``, if it is not what ``rank`` held too."""
    loaded = found.left.get(part)
    if not first_difference(loaded, straight[rank].left.get(part)):
        return None
    others = (other for other in range(len(straight)) if other != rank)
    return next((o for o in others if not first_difference(loaded, straight[o].left.get(part))), None)


def _require_deterministic(who: str, straight: Sequence[Trace], saved: Sequence[Trace], saved_after: int) -> None:
    first = [Trace(trace.states[:1], {}, {}) for trace in straight]
    trouble = _first([Trace(trace.states[:1], {}, {}) for trace in saved], first)
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
    require_bits(f"{head} rank {rank} {when}", name, (found, expected), "without a stop", **more)


def _cause(
    start: Start, plan: Plan, world: Any, pair: tuple[list[Trace], list[Trace]], trouble: tuple[int, int, str]
) -> tuple[str, str | None]:
    """What was lost, and how that shows."""
    resumed, straight = pair
    if trouble[0] == 0:
        return _cause_in_weights(start, plan, world, pair, trouble), None
    evidence = {}
    for part in straight[0].left:
        texts = (
            first_difference(mine.left.get(part, {}), wanted.left.get(part, {}), part)
            for mine, wanted in zip(resumed, straight, strict=True)
        )
        evidence[part] = next((text for text in texts if text), None)
    suspects = [part for part, text in evidence.items() if text]

    def heals(names: list[str]) -> bool:
        left = [trace.left for trace in straight]
        return _first(world.run(_resumed, start, plan, left, names, world_size=len(straight)), straight) is None

    begun = [_PASS] if resumed[0].loaders else []
    held = [part for part in suspects if not part.startswith(NUMBERS)]  # a run that goes on may count for itself
    tries = [suspects, begun, held, *([[*suspects, *begun], [*held, *begun]] if begun else []), [*suspects, _STEPS]]
    tries = [names for number, names in enumerate(tries) if names and names not in tries[:number]]
    suspects = next((names for names in tries if heals(names)), [])
    if not suspects:
        differ = "; ".join(text for part, text in evidence.items() if text and part not in _OWN)
        tried = [part for part, text in evidence.items() if text or not part.startswith(NUMBERS)]
        return f"none of the weights, {', '.join(tried)} alone", differ or None
    for suspect in list(suspects):
        fewer = [other for other in suspects if other != suspect]
        if fewer and heals(fewer):
            suspects = fewer
    ran = _STEPS in suspects  # which changes whatever load does not restore: all that differs may be lost, but for logs
    others = {part for part in evidence if ran and part not in _OWN and not part.startswith(IN_CONTAINERS)}
    lost = [part for part, text in evidence.items() if text and (part in suspects or part in others)]
    shown = [text for part in lost if (text := evidence[part]) and part not in _OWN]
    return _told(lost, ran, _PASS in suspects), "; ".join(shown) or None


def _told(lost: list[str], ran: bool, one_more_pass: bool) -> str:
    names = " and ".join(lost)
    if one_more_pass and not lost:
        return f"{_ONE_MORE_PASS}; with that seed drawn elsewhere, the training goes on exactly"
    if one_more_pass:
        return f"lost: {names}; and {_ONE_MORE_PASS}; with both put right, the training goes on exactly"
    if not ran:
        return f"lost: {names}; put back from the run without a stop, the training goes on exactly"
    if not lost:
        return f"lost: {_STEPS}; with those steps taken before loading, the training goes on exactly"
    return (
        f"lost: {names} and {_STEPS}; the training does not go on exactly with {names} alone put back from the run "
        "without a stop, it does with those steps taken before loading too"
    )


def _cause_in_weights(
    start: Start, plan: Plan, world: Any, pair: tuple[list[Trace], list[Trace]], trouble: tuple[int, int, str]
) -> str:
    resumed, straight = pair
    _, rank, name = trouble
    found = {name: resumed[rank].states[0].get(name)}
    for other, trace in enumerate(straight):
        if other != rank and not differing([digest(found), digest({name: trace.states[0].get(name)})]):
            own = f"it is what rank {other} held: each rank's own was not saved"
            return own + (_ONLY_BUFFERS if _only_buffers_differ(resumed, straight) else _REPLICAS)
    fresh = world.run(_fresh, start, plan, world_size=len(straight))
    if not differing([digest(found), digest({name: fresh[rank].get(name)})]):
        return f"it is what start made: load does not restore this {name.split()[0]}"
    return f"save does not write this {name.split()[0]} as it is, or load does not"


def _only_buffers_differ(resumed: Sequence[Trace], straight: Sequence[Trace]) -> bool:
    """Whether ranks have loaded every parameter."""
    pairs = ([digest(mine.states[0]), digest(wanted.states[0])] for mine, wanted in zip(resumed, straight, strict=True))
    return all(name.startswith("buffer") for pair in pairs for name in differing(pair))


def _fresh(start: Start, plan: Plan) -> State:
    seed_streams(plan.seed + 7919 + dist.get_rank())
    return state_of(start()[0])
