"""The likely causes of a training that ended elsewhere: the precision, a factor, or ranks that diverged."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pdlcheck.checks.message import show
from pdlcheck.checks.state import State, made_by, made_wide

__all__ = [
    "PRECISIONS",
    "Precision",
    "how_far",
    "how_ranks_differ",
    "likely_cause",
    "made_for",
    "precision_of",
    "wants_another_dtype",
    "why_another_way",
]


class Precision(NamedTuple):
    """The tolerances for two trainings that compute in a dtype.

    Args:
        dtype: the lowest in which one of them computes, adds up or sends.
        of_the_way: relative to the farthest way of a tensor's elements.
        of_the_weights: relative to the tensor's largest element.
        of_the_farthest: relative to the farthest way of any weight.
    """

    dtype: torch.dtype
    of_the_way: float
    of_the_weights: float
    of_the_farthest: float


# A step with a wrong gradient is off by 1e-3 or more of the distance that the weights moved, however short that
# distance is compared with the weights. float64 steps lose about 1e-16 of a weight each, float32 steps 6e-8, and
# training magnifies that. A gradient of n products in bfloat16, which has 8 bits, is off by some hundredths. A gradient
# whose exact sum is zero, as that of the bias of the keys in attention, is as large as the rounding of its summands.
# Other gradients have that rounding error, too.
PRECISIONS = {
    torch.float64: Precision(torch.float64, 1e-8, 1e-12, 1e-12),
    torch.float32: Precision(torch.float32, 1e-3, 1e-6, 1e-6),
    torch.float16: Precision(torch.float16, 2e-2, 1e-6, 1e-4),
    torch.bfloat16: Precision(torch.bfloat16, 1e-1, 1e-6, 1e-3),
}

_ADAM = (
    "; where Adam divides gradients by their size, or clipping does, a wrong factor of all of them shows as little as "
    "this: SGD without clipping shows the factor"
)
_APART = (
    "ranks went apart: a gradient was not synchronised, or a step not taken, on all of them alike, or their optimizers "
    "have other settings"
)
_BUFFER = "ranks hold another buffer each: it was not broadcast, or each rank computes its own"
_OWN_SAMPLES = "; what normalises by a batch, as batch norm does in training, sees a rank's own samples alone"
_ROUNDING = 1e-5  # of the way: a wrong gradient is off by more
_SEEN = 1e-2  # of the way: for a factor nearer to 1 the message has the note ``_ADAM``
_NARROW = 2e-2  # of the way: the rounding of float16 and bfloat16 in a step or two


def precision_of(check: str, dtype: torch.dtype) -> Precision:
    """Return the precision for the argument ``dtype`` of a check.

    Raises:
        ValueError: names the supported dtypes.
    """
    if dtype not in PRECISIONS:
        raise ValueError(
            f"{check} takes as dtype the lowest precision in which a training computes or sends, one of "
            f"{', '.join(map(str, PRECISIONS))}; got {dtype!r}"
        )
    return PRECISIONS[dtype]


def made_for(precision: Precision, make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that both trainings are given: in float64, or in float32 for any other dtype."""
    return made_wide(make) if precision.dtype == torch.float64 else made_by(make).float()


def wants_another_dtype(error: RuntimeError) -> bool:
    """Return whether the error is that of data of one dtype with weights of another."""
    return re.search(r"\b(same dtype|[Dd]ouble|float64)\b", str(error)) is not None


def how_far(way: Tensor, went: Tensor) -> str | None:
    """Return the multiple of ``way`` that is nearest to ``went``, the way of the wrong tensors, as text."""
    if not way.any():
        return None
    if not went.any():
        return (
            "they did not move: no gradient reached the optimizer, its learning rate was 0, this rank is not one that "
            "updates them, or another model, such as a copy, was trained"
        )
    times, cosine = _compared(way, went)
    told = f"they went {times:.6g} times as far in this direction, cosine {cosine:.6f}"
    return told + (_ADAM if (went - way).norm() <= 1e-2 * way.norm() else "")


class Apart(NamedTuple):
    """Two ranks that hold different values of a tensor, and the likely cause."""

    words: str
    cause: str

    def __str__(self) -> str:
        """Return the description without the cause."""
        return self.words


def likely_cause(
    way: Tensor, went: Tensor, precision: Precision, world_size: int, apart: Apart | None, *, of_buffers: bool
) -> str | None:
    """Return the cause that explains the way of the wrong tensors, or None.

    Args:
        way: the right way of the wrong tensors.
        went: the way that they went.
        precision: of the trainings.
        world_size: number of ranks.
        apart: the difference between ranks, if there is one.
        of_buffers: whether only buffers are wrong.
    """
    if not way.any() or not went.any():
        return None
    off = float((went - way).norm() / way.norm())
    if precision.dtype == torch.float64 and off <= _ROUNDING:
        return (
            f"without Adam and clipping, rounding in float32, as it is {off:.1e} of the way: something computes, adds "
            "up or sends in float32, such as a reduce_dtype; where that is meant, pass dtype=torch.float32. With one "
            "of the two it may be a wrong factor, which both hide: look with SGD and without clipping first"
        )
    if apart is not None:
        return apart.cause + (_OWN_SAMPLES if apart.cause == _BUFFER and not of_buffers else "")
    (times, cosine), as_many = _compared(way, went), f"as world_size is {world_size}"
    same, along = _of_a_factor(precision)
    if world_size > 1 and cosine > along:
        if abs(times - world_size) < same * world_size:
            summed = "gradients are summed, not averaged, over ranks or as many micro-batches"
            statistics = "statistics are summed, not averaged, over ranks"
            return f"{as_many}: " + (
                statistics if of_buffers else f"{summed}, or the learning rate is multiplied by it"
            )
        if abs(times * world_size - 1) < same:
            what = "statistics" if of_buffers else "gradients"
            return f"{as_many}: {what} are divided by it, or by as many micro-batches, once too often"
    if cosine > along and not of_buffers:
        return _of_a_number(times, same)
    return None


def _of_a_factor(precision: Precision) -> tuple[float, float]:
    """Return the tolerance of a factor and the least cosine.

    They come from a tenth of the rounding that ``precision`` allows relative to the way.
    """
    part = precision.of_the_way / 10
    return max(1e-4, part), 1 - max(1e-6, part**2)


def why_another_way(
    way: Tensor, went: Tensor, what: str, wrong: Sequence[str], learned: Sequence[str], world_size: int
) -> str | None:
    """Return a cause for tensors that went another way while ranks agree and no known factor explains it.

    Args:
        way: the right way of the wrong tensors.
        went: the way that they went.
        what: the name of the right training.
        wrong: the parameters that are wrong, in the order of the model.
        learned: all parameters that move, including the wrong ones, in the order of the model.
        world_size: number of ranks, each of which may have its own factor.
    """
    if not wrong or not way.any() or not went.any():
        return None
    times, cosine = _compared(way, went)
    if cosine > 1 - 1e-6 and abs(times - 1) > _SEEN:
        return (
            "all weights went the right way, another distance: learning rates differ, or one of the two clips and the "
            "other does not, or gradients have a factor of which clipping hides a part, and shows it when left out"
        )
    if abs(cosine) > 1 - 1e-6:
        return None
    if factors := _factors(way, went, world_size):
        told = " or ".join(f"{factor:.6g}" for factor in factors)
        return (
            f"ranks agree, and each element went {told} times as far: parts were scaled by numbers of their own, as "
            "shards by the norm of a shard alone, or parameters by other learning rates"
        )
    if set(wrong) >= set(learned):
        narrow = ", or something computes or sends in a narrower dtype, which dtype= accepts"
        return (
            f"ranks agree on another way than that of {what}: samples weigh otherwise, as where means over uneven "
            "shares, micro-batches or numbers of tokens are averaged, or they are other samples, or another loss"
            f"{narrow if (went - way).norm() <= _NARROW * way.norm() else ''}"
        )
    if list(learned[: len(wrong)]) == list(wrong):
        return (
            f"ranks agree, and {learned[len(wrong)]} and what comes after it are right: the way back from there to "
            f"{wrong[-1]} is cut or wrong, as by a collective in the forward pass that has no backward pass"
        )
    return None


def _factors(way: Tensor, went: Tensor, most: int) -> list[float]:
    """Return two to ``most`` factors such that each element of ``way`` has one of them; empty if there are none."""
    told = way.abs() > 1e-6 * way.abs().max()
    ratios = (went[told] / way[told]).sort().values
    firsts = torch.cat([ratios[:1], ratios[1:][ratios.diff() > 1e-5 * ratios[1:].abs()]])
    return firsts.tolist() if 1 < len(firsts) <= most and len(ratios) >= 4 * most else []


def _of_a_number(times: float, same: float) -> str | None:
    """Return a cause if ``times`` is a whole number or one over it, within the part ``same`` of that number.

    The factor of the number of ranks has been handled before.
    """
    number = round(times) if times > 1 else round(1 / times) if times > 0 else 0
    if number < 2 or number * same > 0.25 or abs((times if times > 1 else 1 / times) - number) > same * number:
        return None
    if times > 1:
        return (
            f"it is {number} times as far: a loss that is a sum over so many samples or micro-batches where their mean "
            "is right, or so many times the learning rate"
        )
    return f"it is {number} times too short: divided by so many samples or micro-batches once too often"


def how_ranks_differ(
    found: Sequence[State],
    precision: Precision,
    expected: Sequence[State],
    *,
    first: Sequence[str] = (),
    learned: bool = False,
) -> Apart | None:
    """Return a tensor of which ranks hold different values although they must be the same, or None.

    Args:
        found: the state of each rank.
        precision: the tolerance for equal values.
        expected: the right state of each rank.
        first: names to compare before others.
        learned: compare only parameters.
    """
    for name in dict.fromkeys([*first, *found[0]]):
        if learned and not name.startswith("parameter"):
            continue
        goals = [state.get(name) for state in expected]
        if any(goal is None or not torch.equal(goal, goals[0]) for goal in goals):  # type: ignore[arg-type]
            continue  # the right states of the ranks differ, too
        for rank, state in enumerate(found[1:], start=1):
            one, own = found[0].get(name), state.get(name)
            if one is None or own is None or own.shape != one.shape or own.is_complex():
                continue
            off = (own.double() - one.double()).abs()
            if off.numel() and float(off.max()) > precision.of_the_weights * float(one.double().abs().max()):
                at = tuple(torch.nonzero(off == off.max())[0].tolist())
                words = f"rank 0 holds {show(one[at])} at {at} of {name}, rank {rank} holds {show(own[at])}"
                return Apart(words, _BUFFER if name.startswith("buffer") else _APART)
    return None


def _compared(way: Tensor, went: Tensor) -> tuple[float, float]:
    """Return the projection of ``went`` on ``way`` as a multiple of ``way``, and the cosine of their angle."""
    along = went.dot(way)
    return float(along / way.dot(way)), float(along / (went.norm() * way.norm()))
