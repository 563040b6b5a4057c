"""The causes of a training that ended elsewhere: the precision, a factor, or ranks that diverged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.message import show
from pdlcheck.checks.state import State
from pdlcheck.checks.trajectories.precision import Precision

__all__ = ["Apart", "Ways", "causes_of_gradients", "diagnose", "how_far", "how_ranks_differ"]

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
_ALONG = 1 - 1e-6  # the least cosine of ways in one direction
_STILL = (
    "no gradient reached the optimizer, its learning rate was 0, this rank is not one that updates them, or another "
    "model, such as a copy, was trained"
)
_STILL_BUFFERS = (
    "nothing updated these buffers: an average or a copy leaves buffers out, or no forward pass ran in training mode"
)
_OF_THESE = (
    "; the other parameters are right, so not the whole loss is wrong: these parameters have a reduction, a group of "
    "ranks, a learning rate or a term of the loss of their own"
)
_LOSS_SCALE = 2.0**8  # the least power of two that is taken for a loss scale


def how_far(way: Tensor, went: Tensor) -> str | None:
    """Return the multiple of ``way`` that is nearest to ``went``, the way of the wrong tensors, as text."""
    if not way.any():
        return None
    if not went.any():
        return "they did not move"
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


class Ways(NamedTuple):
    """The evidence of a training that ended elsewhere.

    Args:
        right: the right way of the wrong tensors.
        went: the way that they went.
        precision: of the trainings.
        world_size: number of ranks.
        apart: the difference between ranks, if there is one.
        of_buffers: whether only buffers are wrong.
        what: the name of the right training.
        wrong: the parameters that are wrong, in the order of the model.
        learned: all parameters that move, including the wrong ones, in the order of the model.
        of_gradients: whether ``right`` and ``went`` are the gradients that the optimizer was given.
    """

    right: Tensor
    went: Tensor
    precision: Precision
    world_size: int
    apart: Apart | None
    of_buffers: bool
    what: str
    wrong: Sequence[str]
    learned: Sequence[str]
    of_gradients: bool = False

    @property
    def off(self) -> float:
        """Return the distance from the right way, as a part of it."""
        return float((self.went - self.right).norm() / self.right.norm())

    @property
    def times(self) -> float:
        """Return how many times as far they went in the right direction."""
        return _compared(self.right, self.went)[0]

    @property
    def cosine(self) -> float:
        """Return the cosine of the angle between the two ways."""
        return _compared(self.right, self.went)[1]

    @property
    def others_are_right(self) -> bool:
        """Return whether other parameters move and are right, which no factor of the whole loss leaves so."""
        return set(self.wrong) < set(self.learned)

    def is_factor(self, factor: float) -> bool:
        """Return whether they went ``factor`` times as far, and in the right direction.

        The tolerances come from a tenth of the rounding that the precision allows relative to the way.
        """
        part = self.precision.of_the_way / 10
        same, along = max(1e-4, part), 1 - max(1e-6, part**2)
        return self.cosine > along and abs(self.times / factor - 1) < same and factor != 1


def diagnose(ways: Ways, *, otherwise: str | None = None, hints: Sequence[str] = ()) -> Diagnosis:
    """Return the causes that explain the way of the wrong tensors.

    Args:
        ways: the evidence.
        otherwise: a hint, for a fault that does not show in the first step; None in the first step.
        hints: more observations.
    """
    notes = [Candidate[Ways].when(text, True) for text in (*hints, *([otherwise] if otherwise else ()))]
    if not ways.right.any():
        return explain(ways, hints=notes)
    if not ways.went.any():
        return explain(ways, [Candidate.when(_STILL_BUFFERS if ways.of_buffers else _STILL, True)])
    tables = [_of_rounding(ways), _of_ranks(ways), _of_world_size(ways), _of_other_numbers(ways)]
    if otherwise is None and ways.apart is None and ways.world_size > 1 and ways.wrong:
        tables += [_of_other_factors(ways), _of_the_way_back(ways)]
        notes += _of_another_way(ways)
    return explain(ways, *tables, hints=notes)


def causes_of_gradients(ways: Ways) -> Iterator[Candidate[Ways]]:
    """Yield the causes of wrong gradients; ``ways`` has gradients in the place of the ways of the weights."""
    yield from _of_world_size(ways)
    if ways.is_factor(ways.world_size) or ways.is_factor(1 / ways.world_size):
        return
    power = 2.0 ** round(math.log2(ways.times)) if ways.times > 0 else 1.0
    scale = max(power, 1 / power)
    if scale >= _LOSS_SCALE and ways.is_factor(power):
        wrong = "multiplies the loss and is not removed" if power > 1 else "is removed and never multiplied the loss"
        yield Candidate.when(
            f"the gradients are {ways.times:.6g} times the right ones: a loss scale of {scale:g} {wrong}", True
        )
        return
    numbers = [*_of_other_numbers(ways)]
    yield from numbers
    if not any(one.holds is not None and one.holds(ways) for one in numbers):
        found, right = (float(side.norm()) for side in (ways.went, ways.right))
        reasons = "a loss scaled in another way, as by a number of tokens, or clipping by another norm"
        if _is_round(right) != _is_round(found):
            clipped, other = (ways.what, "this training") if _is_round(right) else ("this training", ways.what)
            reasons = f"{clipped} clips to its norm, and {other} does not clip, or by another norm"
        yield Candidate(
            f"all gradients that the optimizer got are those of {ways.what} times {ways.times:.6g}: their norm is "
            f"{found:.6g}, that of {ways.what} {right:.6g}: {reasons}",
            holds=lambda ways: ways.cosine > _ALONG and abs(ways.times - 1) > max(1e-6, ways.precision.of_the_way),
            short="a factor of all gradients",
        )


def _is_round(norm: float) -> bool:
    """Return whether a norm is a number of two digits, up to the 1e-6 that clipping adds to what it divides by."""
    return abs(float(f"{norm:.2g}") - norm) <= 1e-5 * norm


def _of_rounding(ways: Ways) -> Iterator[Candidate[Ways]]:
    yield Candidate(
        f"without Adam and clipping, rounding in float32, as it is {ways.off:.1e} of the way: something computes, adds "
        "up or sends in float32, such as a reduce_dtype; where that is meant, pass dtype=torch.float32. With one of "
        "the two it may be a wrong factor, which both hide: look with SGD and without clipping first",
        holds=lambda ways: ways.precision.dtype == torch.float64 and ways.off <= _ROUNDING,
        short="rounding in float32",
    )


def _of_ranks(ways: Ways) -> Iterator[Candidate[Ways]]:
    if ways.apart is not None:
        samples = _OWN_SAMPLES if ways.apart.cause == _BUFFER and not ways.of_buffers else ""
        yield Candidate.when(ways.apart.cause + samples, True)
    else:
        yield Candidate.when("ranks went apart", False)


def _of_world_size(ways: Ways) -> Iterator[Candidate[Ways]]:
    n, what = ways.world_size, "statistics" if ways.of_buffers else "gradients"
    summed = f"as world_size is {n}: {what} are summed, not averaged, over ranks"
    if ways.others_are_right:
        summed += _OF_THESE
    elif ways.of_gradients:
        summed += " or as many micro-batches"
    elif not ways.of_buffers:
        summed += " or as many micro-batches, or the learning rate is multiplied by it"
    divided = f"as world_size is {n}: {what} are divided by it, or by as many micro-batches, once too often"
    if ways.others_are_right:
        divided = f"as world_size is {n}: {what} are divided by it once too often{_OF_THESE}"
    yield Candidate(summed, holds=lambda ways: ways.is_factor(n), short=f"{what} summed over ranks")
    yield Candidate(divided, holds=lambda ways: ways.is_factor(1 / n), short=f"{what} divided by world_size")


def _of_other_numbers(ways: Ways) -> Iterator[Candidate[Ways]]:
    """Yield the whole number that is nearest to the factor, or to its inverse."""
    times = ways.times
    number = round(times) if times > 1 else round(1 / times) if times > 0 else 0
    largest = 0.25 / max(1e-4, ways.precision.of_the_way / 10)  # beyond, whole numbers cannot be told apart
    if ways.of_buffers or not 2 <= number <= largest:
        return
    large, small = ("as large", "too small") if ways.of_gradients else ("as far", "too short")
    those = "the gradients are" if ways.of_gradients else "it is"
    rate = "" if ways.of_gradients else ", or so many times the learning rate"
    in_groups = number < ways.world_size and ways.world_size % number == 0
    if ways.others_are_right:
        ranks = f", as by the {number} ranks of a group" if in_groups else ""
        yield Candidate(
            f"{those} {number} times {large}: not divided{ranks}{_OF_THESE}",
            holds=lambda ways: ways.is_factor(number),
        )
        yield Candidate(
            f"{those} {number} times {small}: divided once too often{ranks}{_OF_THESE}",
            holds=lambda ways: ways.is_factor(1 / number),
        )
        return
    yield Candidate(
        f"{those} {number} times {large}: a loss that is a sum over so many samples or micro-batches where their mean "
        f"is right{rate}",
        holds=lambda ways: ways.is_factor(number),
    )
    group = f", or by the {number} ranks of a group, as along one dimension of a mesh" if in_groups else ""
    yield Candidate(
        f"{those} {number} times {small}: divided by so many samples or micro-batches once too often{group}",
        holds=lambda ways: ways.is_factor(1 / number),
    )


def _of_other_factors(ways: Ways) -> Iterator[Candidate[Ways]]:
    yield Candidate(
        "all weights went the right way, another distance: learning rates differ, or one of the two clips and the "
        "other does not, or gradients have a factor of which clipping hides a part, and shows it when left out",
        holds=lambda ways: ways.cosine > _ALONG and abs(ways.times - 1) > _SEEN,
    )
    factors = _factors(ways.right, ways.went, ways.world_size)
    told = " or ".join(f"{factor:.6g}" for factor in factors)
    of_weights = not ways.of_gradients and not ways.of_buffers
    if of_weights and factors[:1] == [0.0] and len(factors) == 2 and abs(factors[1] - 1) <= _ROUNDING:
        kept = int(((ways.went == 0) & (ways.right != 0)).sum())
        yield Candidate(
            f"ranks agree, and {kept} elements keep their start, while all others of these tensors are right: they got "
            "no gradient or are in no optimizer, or their update is lost, as where one copy is updated and another one "
            "is read",
            holds=lambda ways: ways.apart is None,
            short="elements that keep their start",
        )
        return
    yield Candidate(
        f"ranks agree, and each element went {told} times as far: parts were scaled by numbers of their own, as shards "
        "by the norm of a shard alone, or parameters by other learning rates",
        holds=lambda ways: abs(ways.cosine) <= _ALONG and bool(factors),
        short="each element went as far as one of a few numbers of times",
    )


def _of_the_way_back(ways: Ways) -> Iterator[Candidate[Ways]]:
    count = len(ways.wrong)
    if count < len(ways.learned):
        yield Candidate(
            f"ranks agree, and {ways.learned[count]} and what comes after it are right: the way back from there to "
            f"{ways.wrong[-1]} is cut or wrong, as by a collective in the forward pass that has no backward pass",
            holds=lambda ways: abs(ways.cosine) <= _ALONG and list(ways.learned[:count]) == list(ways.wrong),
            short="the way back is cut",
        )


def _of_another_way(ways: Ways) -> Iterator[Candidate[Ways]]:
    """Yield a hint for ranks that agree."""
    narrow = ", or something computes or sends in a narrower dtype, which dtype= accepts"
    yield Candidate(
        f"ranks agree on another way than that of {ways.what}: samples weigh otherwise, as where means over uneven "
        "shares, micro-batches or numbers of tokens are averaged, or they are other samples, or another loss"
        f"{narrow if ways.off <= _NARROW else ''}",
        holds=lambda ways: abs(ways.cosine) <= _ALONG and set(ways.wrong) >= set(ways.learned),
    )


def _factors(way: Tensor, went: Tensor, most: int) -> list[float]:
    """Return two to ``most`` factors such that each element of ``way`` has one of them; empty if there are none."""
    told = way.abs() > 1e-6 * way.abs().max()
    ratios = (went[told] / way[told]).sort().values
    firsts = torch.cat([ratios[:1], ratios[1:][ratios.diff() > _ROUNDING * ratios[1:].abs()]])
    return firsts.tolist() if 1 < len(firsts) <= most and len(ratios) >= 4 * most else []


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
