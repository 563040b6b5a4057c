"""The messages of failed checks: the rank, the value found, the value expected, and the case."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from pdlcheck.checks.conditions import reporting
from pdlcheck.checks.diagnosis import Diagnosis
from pdlcheck.errors import CheckFailed

__all__ = [
    "Place",
    "best_fit",
    "case",
    "differs",
    "failure",
    "first_and_more",
    "first_index",
    "made_by_start",
    "name_of",
    "require_list",
    "show",
    "takes_world",
    "validates_world",
    "wrong_on_ranks",
]

P = ParamSpec("P")
T = TypeVar("T")

_FIELDS = ("likely_cause", "evidence", "case")  # details that are fields of the error, too


@dataclass(frozen=True)
class Place:
    """The first wrong value of a failure, for the fields of :class:`pdlcheck.errors.CheckFailed`.

    ``found`` and ``expected`` may be tensors of one element.
    """

    rank: int | None = None
    tensor: str | None = None
    index: tuple[int, ...] | None = None
    found: object = None
    expected: object = None
    step: int | None = None


def _plain(value: object) -> object:
    """Return a number of Python, a text or None, so that the error keeps no tensor alive and can be pickled."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return value if value is None or isinstance(value, bool | int | float | complex | str) else repr(value)


def failure(headline: str, place: Place | None = None, /, **details: object) -> CheckFailed:
    """Return the error of a failed check, with one aligned line for each detail. A detail that is None is left out.

    Args:
        headline: the first line of the message; it begins with the name of the subject and a colon.
        place: the first wrong value.
        **details: the further lines. ``likely_cause``, ``evidence`` and ``case`` are fields of the error, too. A
            :class:`Diagnosis` as ``likely_cause`` that has no cause is a line, and no field.

    Example:
        >>> print(failure("sum: rank 0 holds 1", likely_cause="never reduced", case="world=sim"))
        sum: rank 0 holds 1
          likely cause  never reduced
          case          world=sim
    """
    lines = {name.replace("_", " "): text for name, text in details.items() if text is not None}
    width = max(map(len, lines), default=0)
    found = {name: one.cause if isinstance(one, Diagnosis) else one for name, one in details.items()}
    known = {name: None if found.get(name) is None else str(found[name]) for name in _FIELDS}
    at = Place() if place is None else place
    return CheckFailed(
        "\n".join([headline, *(f"  {name:{width}}  {text}" for name, text in lines.items())]),
        subject=_subject_of(headline),
        rank=at.rank,
        step=at.step,
        tensor=at.tensor,
        index=at.index,
        found=_plain(at.found),
        expected=_plain(at.expected),
        cause=known["likely_cause"],
        evidence=known["evidence"],
        case=known["case"],
    )


def _subject_of(headline: str) -> str | None:
    """Return the name before the first colon or comma; None if it is no single word."""
    name, colon, _ = headline.partition(":")
    name = name.split(",")[0]
    return name if colon and " " not in name else None


def takes_world(check: Callable[P, T]) -> Callable[P, T]:
    """Decorate a check so that it validates its arguments, and reports the conditions that a passed run has met.

    ``world`` must be a world; many callers first pass its name. The first argument must be a function; many callers
    pass its result instead. An argument named ``make`` is not validated here, because
    :func:`pdlcheck.checks.state.made_by` validates it.
    """
    signature = inspect.signature(check)

    @validates_world
    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # wrong arguments: the call raises Python's own error
            return check(*args, **kwargs)
        bound.apply_defaults()
        with reporting(name_of(check), bound.arguments):
            return check(*args, **kwargs)

    return checked


def validates_world(check: Callable[P, T]) -> Callable[P, T]:
    """Decorate a check that calls others so that it validates its arguments; the others report their conditions."""
    signature = inspect.signature(check)
    first = next(iter(signature.parameters))

    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # as above
            given = {}
        subject = given.get(first, checked)
        if first != "make" and (not callable(subject) or isinstance(subject, nn.Module)):
            raise TypeError(
                f"{name_of(check)} takes as {first} a function, which it calls, got a {type(subject).__name__} itself"
            )
        world = given.get("world", checked)
        if world is not checked and not callable(getattr(world, "run", None)):
            raise TypeError(
                f"{name_of(check)} takes as world the fixture of that name, or what get_world('sim') returns, "
                f"got {world!r}"
            )
        return check(*args, **kwargs)

    return checked


def first_and_more(names: Sequence[str]) -> str:
    """Return the first name and the number of others.

    Example:
        >>> first_and_more(["weight"]), first_and_more(["weight", "bias", "scale"])
        ('weight', 'weight and 2 more')
    """
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else "no parameter"


def case(world: Any, world_size: int, **more: object) -> str:
    """Return the facts that reproduce a case: ``world=sim world_size=3 shape=(3,) dtype=torch.float32``."""
    facts = {"world": world.name, "world_size": world_size, **more}
    return " ".join(f"{name}={value}" for name, value in facts.items() if value is not None)


def best_fit(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Return the multiple of the right gradients that is nearest to ``found``, and the cosine between the two."""
    values, goals = (torch.cat([one.flatten() for one in tensors]) for tensors in (found, expected))
    values, goals = (torch.view_as_real(each).flatten() if each.is_complex() else each for each in (values, goals))
    square = float(goals.dot(goals))
    product, length = float(values.dot(goals)), float(values.norm())
    if not square or not length or not math.isfinite(length):
        return None
    cosine = product / (length * math.sqrt(square))
    return f"{product / square:.6g} times the gradient of one process, cosine {cosine:.6f}"


def wrong_on_ranks(wrong: Sequence[Sequence[str]], totals: Sequence[int]) -> str:
    """Return a text that lists the wrong tensors of each rank. Ranks with the same wrong tensors are grouped.

    Args:
        wrong: the names of the wrong tensors, for each rank.
        totals: the number of tensors of each rank.

    Example:
        >>> wrong_on_ranks([["weight", "bias"], ["weight", "bias"]], [2, 2])
        "2 of 2 on every rank: 'weight', 'bias'"
        >>> wrong_on_ranks([[], ["bias"], []], [2, 2, 2])
        "1 of 2 on rank 1: 'bias'; none on ranks 0, 2"
    """
    groups: dict[tuple[tuple[str, ...], int], list[str]] = {}
    for rank, (names, total) in enumerate(zip(wrong, totals, strict=True)):
        groups.setdefault((tuple(names), total if names else 0), []).append(str(rank))
    parts = []
    for (names, total), ranks in sorted(groups.items(), key=lambda group: not group[0][0]):
        where = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" if len(groups) > 1 else "every rank"
        listed = f": {', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}"
        parts.append(f"{len(names)} of {total} on {where}{listed}" if names else f"none on {where}")
    return "; ".join(parts)


def name_of(subject: object) -> str:
    """Return the name of the checked function, as the user wrote it."""
    while isinstance(subject, functools.partial):
        subject = subject.func
    return getattr(subject, "__name__", type(subject).__name__)


def made_by_start(made: Any, *names: str, by: str = "start") -> Any:
    """Return ``made``, the result of a check's function ``start``, if it has one item for each of ``names``.

    Args:
        made: the returned value.
        *names: the items that it must have, in order.
        by: the name of the function, for the message.

    Raises:
        TypeError: ``made`` has another type or another number of items.
    """
    if not isinstance(made, tuple | list):
        found = "None" if made is None else f"a {type(made).__name__}"
    elif len(made) != len(names):
        found = f"a {type(made).__name__} of {len(made)}"
    elif names[0] == "model" and not hasattr(made[0], "named_parameters"):
        found = f"a {type(made[0]).__name__} as the model"
    else:
        return made
    raise TypeError(f"{by} must return ({', '.join(names)}), it returned {found}")


def require_list(value: object, words: str) -> None:
    """Raise ``TypeError`` with the message ``words`` if ``value`` is one tensor in place of a list of tensors.

    A tensor is a sequence too, so the mistake would otherwise pass unnoticed.
    """
    if isinstance(value, Tensor):
        raise TypeError(words)


def show(value: object) -> str:
    """Return a number as text: 1 for 1.0, and no more digits than its dtype can distinguish."""
    digits = 17
    if isinstance(value, Tensor):
        digits = {torch.float32: 9, torch.float16: 5, torch.bfloat16: 4}.get(value.dtype, 17)
        value = value.item()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return "-0.0" if value == 0 and math.copysign(1, value) < 0 else str(int(value))
    return f"{value:.{digits}g}" if isinstance(value, float) and digits < 17 else repr(value)


def differs(found: Tensor, expected: Tensor) -> Tensor:
    """Return a mask of the elements in which two tensors of one shape differ. NaN equals itself."""
    return (found != expected) & ~(found.isnan() & expected.isnan())


def first_index(wrong: Tensor) -> tuple[int, ...]:
    """Return the index of the first True; ``()`` for a tensor without dimensions."""
    return tuple(int(i) for i in wrong.nonzero()[0])
