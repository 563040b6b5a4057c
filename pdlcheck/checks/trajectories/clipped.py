"""The cause of gradients that are clipped by the norm of a part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from pdlcheck.checks.message import first_and_more

__all__ = ["missing_from_norm"]

_SAME = 1e-5  # of a norm: clipping adds 1e-6 to what it divides by


def missing_from_norm(found: Mapping[str, Tensor], right: Mapping[str, Tensor], what: str) -> str | None:
    """Return which gradients are missing from the norm that clips, in words; None if that does not explain them.

    The right gradients are clipped to their norm. Those that were found are a factor times the right ones, and without
    the missing ones they have that norm. The missing ones may be left as they were, or be scaled with the others. Parts
    that are clipped by norms of their own are named, too.

    Args:
        found: the last gradient of each parameter.
        right: the same in the right training.
        what: the name of the right training.
    """
    limit = _norm(right)
    times = {name: _factor(found[name], goal) for name, goal in right.items() if goal.any()}
    known = {name: factor for name, factor in times.items() if factor is not None}
    if not limit or len(known) < max(len(times), 2):
        return None
    groups: list[list[str]] = []  # of one factor each, the smallest first
    for name in sorted(known, key=lambda name: known[name]):
        if groups and known[name] <= known[groups[-1][0]] * (1 + _SAME):
            groups[-1].append(name)
        else:
            groups.append([name])
    if known[groups[0][0]] <= 1 + _SAME:
        return None
    if len(groups) > 1 and all(_is_norm(found, set(group), limit) for group in groups):
        return (
            f"{len(groups)} parts of the gradients have the norm {limit:.6g} each, one of them is {groups[0][0]}: each "
            f"part is clipped by a norm of its own, {what} clips all of them by one"
        )
    if len(groups) == 1:
        sets = _sets(list(known))
        words = f"all gradients are {known[groups[0][0]]:.6g} times those of {what}"
    elif len(groups) == 2:
        sets = [[name for name in right if name in groups[1]]]
        words = "those are not scaled, either"
    else:
        return None
    sets = [missing for missing in sets if _is_norm(found, known.keys() - set(missing), limit)]
    if len(sets) != 1:
        return None
    names, one = first_and_more(sets[0]), len(sets[0]) == 1
    return (
        f"{names} {'is' if one else 'are'} missing from the norm that clips: without {'it' if one else 'them'} the "
        f"gradients have the norm {limit:.6g}, to which {what} clips all of them, and {words}"
    )


def _sets(names: Sequence[str]) -> list[list[str]]:
    """Return the sets of parameters that a norm may leave out: one, those of a module, or those of one kind."""
    found: dict[tuple[str, ...], None] = {(name,): None for name in names}
    for end in (0, -1):  # of the name: the outermost module, and the kind
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(name.split(".")[end], []).append(name)
        found |= {tuple(group): None for group in groups.values() if len(group) < len(names)}
    return [list(one) for one in found]


def _is_norm(found: Mapping[str, Tensor], names: set[str], norm: float) -> bool:
    return abs(_norm({name: found[name] for name in names}) - norm) <= _SAME * norm


def _norm(gradients: Mapping[str, Tensor]) -> float:
    return float(sum(float(one.double().norm()) ** 2 for one in gradients.values()) ** 0.5)


def _factor(found: Tensor, right: Tensor) -> float | None:
    """Return the factor of a gradient; None if it is not one factor times the right one."""
    ours, theirs = found.double().flatten(), right.double().flatten()
    factor = float(ours.dot(theirs) / theirs.dot(theirs))
    return factor if float((ours - factor * theirs).norm()) <= _SAME * float(ours.norm()) else None
