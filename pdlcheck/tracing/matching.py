"""The demands on two traces that are compared: one model, the same samples, shapes that fit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pdlcheck.tracing.assembly import Logical
from pdlcheck.tracing.errors import TraceError
from pdlcheck.tracing.files import Trace
from pdlcheck.tracing.records import Key

__all__ = ["require_one_model", "require_shapes"]


def require_one_model(good: Trace, other: Trace) -> None:
    """Raise an error unless both traces have the same parameters.

    Raises:
        TraceError: names the parameters that only one of them has.
    """
    ours = dict.fromkeys(name for rank in good.ranks for name in rank.parameters)
    theirs = dict.fromkeys(name for rank in other.ranks for name in rank.parameters)
    if not ours.keys() & theirs.keys():
        raise TraceError(
            f"{good.directory} and {other.directory} have no parameter in common ({_some(ours)}; {_some(theirs)}): "
            "these are traces of two models; or give the mapping a rename= to the names of the trusted run"
        )
    if missing := [name for name in ours if name not in theirs]:
        raise TraceError(
            f"{other.directory} lacks {_some(missing)} of {good.directory}: no rank has it under that name. "
            f"{_nearest(missing[0], [name for name in theirs if name not in ours])}"
            "The layer is on no rank, or rename= of the mapping gives it another name"
        )
    if more := [name for name in theirs if name not in ours]:
        raise TraceError(
            f"{good.directory} lacks {_some(more)} of {other.directory}: {_nearest(more[0], list(ours))}"
            "compare runs of one model, or correct rename= of the mapping"
        )


def require_shapes(good: dict[Key, Logical], other: dict[Key, Logical], step: int, notes: list[str]) -> None:
    """Raise an error unless the tensors of both traces have one shape; find those that are one for all samples.

    Raises:
        TraceError: a shape differs, and what the mapping may lack.
    """
    repeated: list[Key] = []
    wrong: list[Key] = []
    fitting = 0
    for key, goal in good.items():
        if key not in other:
            continue
        if other[key].shape == goal.shape:
            fitting += key[0] == "forward" and any(
                split.how == "batch" for split in other[key].members[0].record.splits
            )
        elif other[key].repeated().shape == goal.shape:
            repeated.append(key)
        else:
            wrong.append(key)
    if wrong or sum(key[0] == "forward" for key in repeated) > fitting:
        _refuse(good, other, [*wrong, *repeated], step)
    for key in repeated:
        other[key] = other[key].repeated()
    missing = [key[1] for key in good if key[0] == "forward" and key not in other]
    outputs = sum(key[0] == "forward" for key in good)
    if outputs and len(missing) == outputs:
        raise TraceError("the traces have no output of a module in common; give the mapping a rename=")
    if missing and step == 0:
        notes.append(f"not compared, as the parallel run has no such output: {_some(dict.fromkeys(missing))}")


def _refuse(good: dict[Key, Logical], other: dict[Key, Logical], wrong: list[Key], step: int) -> None:
    key = min(wrong, key=lambda one: (one[0] != "input", good[one].order))
    goal, found = good[key].shape, other[key].shape
    kind, name = key[:2]
    what = {"forward": "the output of ", "backward": "the gradient of the output of ", "input": "", "start": ""}
    told = f"{what.get(kind, 'the gradient of ')}{name} in step {step + 1}"
    if len(goal) == len(found):
        differing = [dim for dim in range(len(goal)) if goal[dim] != found[dim]]
        splits = {split.dim for split in other[key].members[0].splits}
        dim = differing[0]
        has_more = kind == "input" and found[dim] > goal[dim]
        if has_more or (dim in splits and kind in {"input", "forward", "backward"}):
            raise TraceError(
                f"{told}: the parallel run has {found[dim]} elements along dimension {dim} (the samples), "
                f"the trusted tensor {goal[dim]}. Train both runs on the same samples; if ranks are given the same "
                'samples, say what the others are for, such as mapping=Mapping(ranks={"dp": (0, 2), "tp": (1, 2)})'
            )
        if goal[dim] > found[dim] and goal[dim] % max(found[dim], 1) == 0:
            raise TraceError(
                f"{told}: the pieces of the parallel run make {found}, the trusted tensor is {goal}. The mapping "
                f'misses the shards of dimension {dim}: add the rule "{name}": Shard({dim})'
            )
    raise TraceError(
        f"{told}: the pieces of the parallel run make {found}, the trusted tensor is {goal}; correct its rule"
    )


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _nearest(name: str, others: list[str]) -> str:
    near = difflib.get_close_matches(name, others, n=1, cutoff=0.4)
    return f"The nearest name is {near[0]}. " if near else ""
