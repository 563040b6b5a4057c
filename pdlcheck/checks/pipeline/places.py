"""The location of a fault in a pipeline: the micro-batches, and the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.pipeline.steps import Named, is_near
from pdlcheck.compat.torch.modules import submodules

__all__ = ["diagnose_outputs", "has_right_ones", "localise_error", "of_later_microbatches", "wrong_parts"]

SHOWN = 4
_ROWS = 8  # shown


def wrong_parts(found: Tensor, goal: Tensor, count: int) -> str | None:
    """Return a text that lists the micro-batches whose outputs are wrong; None for a scalar."""
    if not goal.dim():
        return None
    parts = zip(found.tensor_split(count), goal.tensor_split(count), strict=True)
    wrong = [str(i) for i, (own, right) in enumerate(parts) if not is_near(own, right)]
    return f"{len(wrong)} of {count} micro-batches: {', '.join(wrong[:SHOWN])}{', ...' if wrong[SHOWN:] else ''}"


def diagnose_outputs(found: Tensor, goal: Tensor, count: int, *rarely: Iterable[Candidate[Tensor]]) -> Diagnosis:
    """Return the causes of wrong outputs, first of all that they are right ones in other places.

    Args:
        found: the outputs of the pipeline.
        goal: those of one process, of the same shape.
        count: number of micro-batches.
        *rarely: candidates to try if no usual one fits.
    """
    if not goal.dim() or len(goal) < 2:
        return Diagnosis()
    order = _order(found, goal.tensor_split(count)) or []
    times = len(set(order))
    return explain(
        found,
        [
            Candidate(
                f"micro-batches are in the order {order}",
                holds=lambda _: times == len(order) > 0,
                short="another order of micro-batches",
            ),
            Candidate(
                f"every micro-batch has the outputs of micro-batch {next(iter(order), 0)}: one input was sent again",
                holds=lambda _: times == 1 < len(order),
                short="one micro-batch in place of all",
            ),
            Candidate(
                f"the outputs are those of micro-batches {order}: some were sent or returned more than once",
                holds=lambda _: 1 < times < len(order),
                short="micro-batches more than once",
            ),
        ],
        _of_rows(found, goal),
        *rarely,
    )


def of_later_microbatches(
    found: Tensor, outputs: Callable[[], Sequence[Tensor]], number: int, count: int
) -> Iterator[Candidate[Tensor]]:
    """Yield the cause in which every micro-batch has the outputs of one that comes later or earlier by one distance.

    Args:
        found: the outputs of the pipeline.
        outputs: returns those of one process for each batch, at the weights of this step.
        number: of the batch.
        count: number of micro-batches.
    """
    goals = outputs()
    if any(not goal.dim() or len(goal) < count for goal in goals):
        return
    stream = [part for goal in goals for part in goal.tensor_split(count)]
    mine = range(number * count, (number + 1) * count)
    pieces = found.tensor_split(count)
    for distance in range(-mine.start, len(stream) - mine.start):
        places = [(place + distance) % len(stream) for place in mine]
        if distance and all(_is_same(piece, stream[at]) for piece, at in zip(pieces, places, strict=True)):
            far = abs(distance)
            before = "ahead" if distance > 0 else "behind"
            yield Candidate.when(
                f"every micro-batch has the outputs of the one {far} {'later' if distance > 0 else 'earlier'} in the "
                f"data: a stage is {far} micro-batch{'es' if far > 1 else ''} {before} of the others in its iterator, "
                "as where one stage alone takes a batch to learn its shape",
                true=True,
            )


def _is_same(piece: Tensor, right: Tensor) -> bool:
    return piece.shape == right.shape and is_near(piece, right)


def _of_rows(found: Tensor, goal: Tensor) -> Iterator[Candidate[Tensor]]:
    """Yield the cause in which single samples have changed places."""
    rows = [next((i for i, right in enumerate(goal) if is_near(row, right)), None) for row in found]
    yield Candidate(
        f"the outputs are right and stand at other samples, in the order {_first(rows)}: parts were put "
        "together in another way than they were divided",
        holds=lambda _: None not in rows and len(set(rows)) == len(rows),
        short="right outputs at other samples",
    )


def _order(found: Tensor, parts: Sequence[Tensor]) -> list[int] | None:
    """Return the micro-batches that ``found`` consists of, each once if that is possible; None if there are others."""
    for again in (False, True):
        order, left = list[int](), found
        while len(left):
            fits = [
                i
                for i, part in enumerate(parts)
                if (again or i not in order) and len(part) and is_near(left[: len(part)], part)
            ]
            if not fits:
                break
            order.append(fits[0])
            left = left[len(parts[fits[0]]) :]
        if not len(left):
            return order
    return None


def _first(rows: Sequence[object]) -> str:
    return f"[{', '.join(map(str, rows[:_ROWS]))}{', ...' if rows[_ROWS:] else ''}]"


def has_right_ones(everyone: Sequence[Named], wrong: Sequence[Sequence[str]], right: Named) -> bool:
    """Return whether a gradient that is not zero is right on every rank that holds it."""
    return bool(_right_ones(everyone, wrong, right))


def localise_error(
    model: nn.Module, everyone: Sequence[Named], wrong: Sequence[Sequence[str]], right: Named
) -> str | None:
    """Return a text that locates the fault between the layers of a sequential model, or None.

    The first layer with a right gradient proves that the gradient which reached it was right.
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        return None
    order = list(submodules(model))  # named_children lists a layer that occurs twice only once
    at = {name: order.index(_layer(name)) for name in _right_ones(everyone, wrong, right) if _layer(name) in order}
    if not at:
        return None
    name = min(at, key=lambda one: (at[one], one))
    spoilt = {_layer(one) for names in wrong for one in names}
    if alone := [layer for layer in order[at[name] :] if layer in spoilt]:
        layers = (
            f"layer{'s' if alone[1:] else ''} {', '.join(map(repr, alone[:SHOWN]))}{', ...' if alone[SHOWN:] else ''}"
        )
        return f"in {layers} alone: the gradient of {name!r}, which comes back through there, is right"
    return f"on the way back, after layer {_layer(name)!r}: its gradients and those of later layers are right"


def _layer(name: str) -> str:
    return name.split(".")[0]


def _right_ones(everyone: Sequence[Named], wrong: Sequence[Sequence[str]], right: Named) -> set[str]:
    """Return the names of right gradients. Zero gradients are left out, because they prove nothing."""
    held = {name for own in everyone for name in own if not is_near(torch.zeros_like(right[name]), right[name])}
    return held - {name for names in wrong for name in names}
