"""The check that ranks together compute the metric of one process on all samples, for every number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from pdlcheck.checks.conditions import EMPTY, ONE_EACH, meet
from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.message import Place, case, failure, name_of, require_list, show, takes_world
from pdlcheck.checks.metrics.causes import in_other_places, rare_causes, sample_count_cause
from pdlcheck.checks.metrics.one_process import report_without_group
from pdlcheck.checks.metrics.values import TAILS, Alone, Values, is_number, near, values_of
from pdlcheck.errors import CheckFailed, Inconclusive

__all__ = ["check_metric"]

_ORDERS = 2  # other orders to try, for each treatment of the tail
_LISTED = 6
_UNLIKE = "ranks report unlike numbers: each has that of its own samples, or what is reduced does not reach all of them"
_AS_ONE_RANK = (
    "one rank reports the same as these ranks: they share the samples rightly, and {reference} reports another number "
    "for any number of ranks, so either of the two may be wrong"
)
_FEW = {
    ONE_EACH: "with more samples on each rank it is right, with one on each it is wrong: a dimension of size 1 is "
    "squeezed, or each rank computes what one sample does not have, such as a variance",
    EMPTY: "with a sample on each rank it is right, with none on a rank it is wrong: that rank contributes a number, "
    "such as the NaN of a mean over nothing, or the start of a maximum",
}
_OTHER_PLACES = (
    "these are the right numbers in other places: what ranks have is put end to end, where samples are dealt to them "
    "in turn, or the other way round"
)


@takes_world
def check_metric(
    evaluate: Callable[..., Any],
    samples: Sequence[Tensor],
    world: Any,
    *,
    world_sizes: Sequence[int] = (2, 3),
    reference: Callable[..., Any] | None = None,
    min_samples: int = 1,
) -> None:
    """Check that the ranks' report on the samples that they share is the report of one process on all samples.

    The check evaluates all samples, and all except the last, because one of the two numbers is uneven over ranks. It
    also evaluates one sample for each rank, and one less, so that a rank has none, if the program takes so few. If
    the mean of the ranks' values is right by chance, as with ``torch.arange``, it evaluates once more with the last
    sample first. A sampler may repeat the first or last samples, or drop the last ones. If no number would change by
    that, the check evaluates once more with a sample there that changes one. Numbers may be off by 1e-5 of the largest
    that any share of the samples has; integers and all other values must be equal.

    Args:
        evaluate: called as ``evaluate(*samples)`` on every rank, with all samples. It takes the rank's share as the
            program does, for example by a sampler. Returns a number, a tensor, or lists and dicts of them. It returns
            None on ranks that report nothing, or in the place of a number that other ranks report.
        samples: tensors whose first dimension is the samples, such as inputs and targets; two samples or more.
        world: where the ranks run.
        world_sizes: numbers of ranks.
        reference: called as ``reference(*samples)`` in one process. The default is ``evaluate`` in one process without
            a process group, or in a world of one rank if it needs a group. It does not detect that batches of unlike
            sizes count the same.
        min_samples: the fewest samples that the program is made for. With 1, a rank may have none.

    Raises:
        AssertionError: a rank reports a wrong number. The message names the rank, the number and the likely cause.
            Causes are: the mean of the ranks' values, the value of one rank's share, or a sum instead of a mean. A
            sampler or a loader may repeat or drop samples. Batches of unlike sizes may count the same. A sum may be
            divided by another number of samples.
        Inconclusive: one process reports nothing or NaN, or the same for every share of the samples.

    Example:
        >>> import torch.distributed as dist
        >>> from pdlcheck.worlds import get_world
        >>> def mean_error(errors):
        ...     own = errors[dist.get_rank() :: dist.get_world_size()]
        ...     total = torch.stack([own.sum(), torch.tensor(float(len(own)))])
        ...     dist.all_reduce(total)
        ...     return float(total[0] / total[1])
        >>> check_metric(mean_error, [torch.arange(7.0)], get_world("sim"))
    """
    __tracebackhide__ = True
    require_list(samples, "check_metric takes as samples a list of tensors, such as inputs and targets; pass [samples]")
    for one in samples:
        if not isinstance(one, Tensor) or not one.dim():
            what = "tensor without dimensions" if isinstance(one, Tensor) else type(one).__name__
            raise TypeError(
                f"check_metric takes as samples a list of tensors whose first dimension is samples, got a {what} "
                "in it; for other samples give their places, torch.arange(number), and have evaluate look them up"
            )
    count = min((len(tensor) for tensor in samples), default=0)
    if count < 2 or any(len(tensor) != count for tensor in samples):
        sizes = ", ".join(str(len(tensor)) for tensor in samples) or "none"
        raise ValueError(f"check_metric needs tensors with the same number of samples, 2 or more; got {sizes}")
    if any(size < 2 for size in world_sizes) or not world_sizes:
        raise ValueError(f"check_metric compares with one process; world_sizes must be 2 or more, got {world_sizes}")
    if reference is None:
        reference = report_without_group(evaluate, tuple(samples), world)
    shows, by_chance, tried = False, None, []
    for order in (None, "last_sample_first"):
        for size in (count, count - 1):
            given = tuple(t[:size] if order is None else t[:size].roll(1, 0) for t in samples)
            alone = Alone(evaluate, reference, given, world, order)
            tried.append(alone)
            for world_size in world_sizes:
                _compare(alone, world_size)
                shows = shows or alone.tells_shares_apart(world_size)
                if by_chance != set():
                    found = alone.right_by_chance(world_size)
                    by_chance = found if by_chance is None else by_chance & found
        if not by_chance:
            break
    if not shows:
        raise Inconclusive(
            f"{name_of(evaluate)} reports the same for every share of the samples, no fault would show: give it "
            "samples that differ"
        )
    for how, repeated in TAILS.items():
        for alone in _with_a_telling_tail(tried, world_sizes, how, repeated):
            for world_size in world_sizes:
                _compare(alone, world_size)
    _compare_few_samples(tried[0], world_sizes, min_samples)


def _compare_few_samples(alone: Alone, world_sizes: Sequence[int], min_samples: int) -> None:
    """Compare the reports on one sample for each rank, and on one less, so that a rank has none.

    A program may refuse so few samples. The condition is then not met.
    """
    __tracebackhide__ = True
    count = len(alone)
    met = {
        ONE_EACH: any(size in (count, count - 1) for size in world_sizes),
        EMPTY: any(size > count - 1 for size in world_sizes),
    }  # compared already
    few = [(words, size, size - (words is EMPTY)) for size in world_sizes for words in met]
    for words, world_size, samples in few:
        if not max(1, min_samples) <= samples < count - 1:
            continue
        part = Alone(alone.evaluate, alone.reference, tuple(t[:samples] for t in alone.samples), alone.world)
        try:
            if part.can_be_compared():
                _compare(part, world_size, few=_FEW[words])
                met[words] = True
        except CheckFailed:
            raise
        except Exception:  # also a deadlock, for which processes wait long
            break
    meet(met)


def _with_a_telling_tail(
    tried: Sequence[Alone], world_sizes: Sequence[int], how: str, repeated: bool
) -> Iterator[Alone]:
    """Yield other orders of the same samples, in which a treatment of the tail changes a number.

    Such an order is needed for a number that hides the treatment in all orders that were tried.
    """
    pairs = [(alone, world_size) for alone in tried for world_size in world_sizes if len(alone) % world_size]
    hidden = set(tried[0].of_all)
    for alone, world_size in pairs:
        if hidden:
            hidden &= alone.hides(world_size, how)
    alone, world_size = min(pairs, key=lambda pair: (-len(pair[0]) if repeated else len(pair[0])) % pair[1])
    orders = 0
    for place, value in tried[0].of_all.items():
        if place not in hidden or not is_number(value) or orders == _ORDERS:
            continue
        row = alone.telling(place, repeated=repeated)
        if row is None:
            continue
        other = alone.with_one_at(row, first=how == "the first again")
        still = other.hides(world_size, how) if other.can_be_compared() else hidden
        if place not in still:
            orders += 1
            hidden &= still
            yield other


def _compare(alone: Alone, world_size: int, few: str | None = None) -> None:
    """Compare the report of each rank with that of one process.

    Args:
        alone: the samples, and the reports of one process.
        world_size: the number of ranks.
        few: the cause if a number is wrong, for a program that is right with more samples.
    """
    __tracebackhide__ = True
    who, expected = name_of(alone.evaluate), alone.of_all
    reports = alone.world.run(alone.evaluate, *alone.samples, world_size=world_size)
    told = [(rank, values_of(report)) for rank, report in enumerate(reports) if report is not None]
    facts = case(alone.world, world_size, samples=len(alone), order=alone.order)
    told = [(rank, found) for rank, found in told if any(value is not None for value in found.values())]
    if not told:
        raise failure(f"{who}: no rank reports anything, one process reports {_listed(expected)}", case=facts)
    for rank, found in told:
        if found.keys() != expected.keys():
            raise failure(
                f"{who}: rank {rank} reports {_listed(found)}, one process reports {_listed(expected)}",
                likely_cause=sample_count_cause(alone, world_size, found),
                case=facts,
            )
        for place, value in expected.items():
            held = found[place]
            if held is None and any(others.get(place) is not None for _, others in told):
                continue  # another rank reports it
            if alone.accepts(world_size, place, held):
                continue
            raise failure(
                f"{who}: rank {rank} reports {_shown(held)}{place}, "
                f"one process on all {len(alone)} samples reports {_shown(value)}",
                Place(rank, place.strip() or None, None, held, value),
                ranks=", ".join(f"rank {other}: {_shown(values.get(place))}" for other, values in told),
                one_rank=_told_of_one_rank(alone, place, held),
                likely_cause=few or _why(alone, world_size, place, found, [values for _, values in told]),
                do=None if few is None else f"pass min_samples={len(alone) + 1} if there are never so few samples",
                case=facts,
            )


def _why(alone: Alone, world_size: int, place: str, found: Values, ranks: Sequence[Values]) -> Diagnosis:
    """Return the mistakes that explain all wrong numbers of a rank.

    Mistakes that explain only the number at ``place`` and at least half of the wrong numbers are hints.
    """
    wrong = [where for where, value in found.items() if not alone.accepts(world_size, where, value)]
    explained: dict[str, list[str]] = {text: [] for text, _ in alone.mistakes(world_size, place)}
    for where in wrong:
        fits = {text for text, value in alone.mistakes(world_size, where) if near(found[where], value, 0.0)}
        for text in fits & explained.keys():
            explained[text].append(where)

    def places_changed(found: Values) -> bool:
        return in_other_places([found[where] for where in wrong], [alone.of_all[where] for where in wrong])

    def gives(values: Values, found: Values) -> bool:
        return all(near(found[where], values.get(where), 0.0) for where in wrong)

    def as_one_rank(found: Values) -> bool:
        return all(where in alone.of_one_rank and near(found[where], alone.of_one_rank[where], 0.0) for where in wrong)

    def explains_all(text: str, _: Values) -> bool:
        return len(explained[text]) == len(wrong)

    def explains_most(text: str, _: Values) -> bool:
        return place in explained[text] and 2 * len(explained[text]) >= len(wrong)

    return explain(
        found,
        [Candidate(_OTHER_PLACES, holds=places_changed)],
        [Candidate(text, holds=partial(explains_all, text)) for text in explained],
        *(
            (Candidate(text, holds=partial(gives, values)) for text, values in group)
            for group in rare_causes(alone, world_size)
        ),
        [Candidate(_AS_ONE_RANK.format(reference=_reference_of(alone)), holds=as_one_rank, short="as on one rank")],
        hints=[
            *(
                Candidate(f"{len(of)} of {len(wrong)} wrong numbers are {text}", holds=partial(explains_most, text))
                for text, of in explained.items()
            ),
            Candidate.when(_UNLIKE, _differ([values.get(place) for values in ranks])),
        ],
    )


def _told_of_one_rank(alone: Alone, place: str, held: Any) -> str | None:
    """Return what one rank reports, if the reference reports another number."""
    value = alone.of_one_rank.get(place)
    if value is None or near(value, alone.of_all[place], 0.0):
        return None
    as_all = ", as these ranks do" if near(held, value, 0.0) else ""
    return f"it reports {_shown(value)}{as_all}; {_reference_of(alone)} is what is compared with"


def _reference_of(alone: Alone) -> str:
    who, reference = name_of(alone.evaluate), name_of(alone.reference)
    return f"{who} without a process group" if who == reference else reference


def _differ(values: Sequence[Any]) -> bool:
    """Return whether the ranks that report something report different values."""
    told = [value for value in values if value is not None]
    return not all(near(value, told[0], 0.0) or _shown(value) == _shown(told[0]) for value in told)


def _shown(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else show(value)


def _listed(values: Values) -> str:
    texts = [f"{_shown(value)}{place}" for place, value in list(values.items())[:_LISTED]]
    more = f", ... ({len(values)} in all)" if len(values) > _LISTED else ""
    return ", ".join(texts) + more or "nothing"
