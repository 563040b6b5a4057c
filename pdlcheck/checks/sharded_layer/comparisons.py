"""The comparison of what the ranks of a sharded layer compute with what the whole layer computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pdlcheck.checks.diagnosis import explain
from pdlcheck.checks.gradients.no_gradients import none_on
from pdlcheck.checks.message import (
    Place,
    failure,
    first_index,
    show,
    wrong_on_ranks,
)
from pdlcheck.checks.rank_results import bits
from pdlcheck.checks.sharded_layer import causes as likely
from pdlcheck.checks.sharded_layer.passes import (
    Cut,
    Pass,
    Tensors,
    values_of,
)
from pdlcheck.checks.tolerances import Tolerance
from pdlcheck.errors import Inconclusive

__all__ = ["Terms", "require_batch", "require_elements"]


_NO_WAY_BACK = (
    "if the layer is meant to have no gradients, as under torch.no_grad(), let make return one that has none either"
)
_OTHER_INPUTS = "if no gradient of it is used, as of a mask, call requires_grad_() on the other inputs in batches"


def require_batch(
    when: str,
    number: int,
    truth: Pass,
    layer: nn.Module,
    everyone: Sequence[Cut],
    held: Tensor,
    buffers: bool,
    terms: Terms,
) -> None:
    """Compare the passes of one batch on all ranks with that of the whole layer."""
    __tracebackhide__ = True
    grads = _flat(layer, truth.parameters_grad)
    _require_outputs(when, number, layer, everyone, terms)
    if buffers:
        _require_buffers(when, number, truth.buffers, everyone, terms)
    if not any(g is not None for g in (*truth.parameters_grad.values(), *truth.inputs_grad)):
        _require_something(when, truth)
        return
    if not grads.any() and not any(g is not None and g.any() for g in truth.inputs_grad):
        raise Inconclusive(f"{when} no gradient of the whole layer differs from zero, no fault would show")
    where = "; outputs are right, so look at the backward pass"
    _require_parameters(when, number, grads, everyone, held, terms._replace(where=f"{where} and at sync"))
    _require_equal_copies(when, number, len(grads), everyone, terms)
    _require_inputs(when, number, everyone, terms._replace(where=where))


class Terms(NamedTuple):
    """The arguments of every comparison.

    Args:
        facts: of the case.
        relative: the error that an element may have.
        where: the part of the code that must have a fault, for the end of a sentence.
        rarer: yields causes that need further runs; takes ``where``, and whether the wrong value is NaN.
        marked: whether the inputs of the batch say which of them have a gradient.
    """

    facts: str
    relative: float
    where: str = ""
    rarer: Callable[[str, bool], Iterable[likely.Cause]] = lambda where, nan: ()
    marked: bool = False

    @property
    def near(self) -> Tolerance:
        """Return the tolerance of every comparison."""
        return likely.tolerance_of(self.relative)

    def off(self, value: Tensor, goal: Tensor) -> Tensor:
        """Return a mask of the elements that differ."""
        return ~self.near.accepts(value, goal)


def require_elements(who: str, layer: nn.Module, everyone: Sequence[Cut], terms: Terms) -> Tensor:
    """Check that ranks hold only elements of the whole layer, and all of them.

    Returns:
        For each number of an element, how many ranks hold it.
    """
    __tracebackhide__ = True
    flat = _flat(layer, values_of(layer))
    held = torch.zeros(len(flat), dtype=torch.long)
    for rank, cut in enumerate(everyone):
        own = torch.zeros_like(held)
        for name, numbers in cut.numbers.items():
            strange = (numbers < 0) | (numbers >= len(flat))
            strange |= cut.values[name] != flat[numbers.masked_fill(strange, 0)]
            if strange.any():
                at = first_index(strange)
                raise failure(
                    f"{who}: rank {rank} holds {show(cut.values[name][at])} at {at} of parameter {name!r}, "
                    "which is no element of the whole layer",
                    likely_cause="it was drawn or computed, not copied from the layer that shard is given",
                    case=terms.facts,
                )
            own[numbers.flatten()] = 1
        held += own
    if len(flat) > 1 and not held[1:].all():
        missing = int((held[1:] == 0).nonzero()[0]) + 1
        name, first, parameter = _parameter_of(layer, missing)
        raise failure(
            f"{who}: no rank holds the element {_index(missing - first, parameter)} of parameter {name!r} of the whole "
            "layer",
            held=f"{int((held[1:] > 0).sum())} of {len(flat) - 1} elements",
            likely_cause=likely.of_missing(held[1:], held[first : first + parameter.numel()], parameter, len(everyone)),
            case=terms.facts,
        )
    return held


def _require_outputs(when: str, number: int, layer: nn.Module, everyone: Sequence[Cut], terms: Terms) -> None:
    __tracebackhide__ = True
    parameters = dict(layer.named_parameters())
    for rank, cut in enumerate(everyone):
        found, goals = cut.passes[number].outputs, cut.selected[number][0]
        if [y.shape for y in found] != [y.shape for y in goals]:
            raise failure(
                f"{when} rank {rank} returns {_shapes(found)}, expected {_shapes(goals)}",
                likely_cause="the rank returns a part of the output: say which by output_of, or gather it",
                case=terms.facts,
            )
        for place, (value, goal) in enumerate(zip(found, goals, strict=True)):
            returned = [one.passes[number].outputs for one in everyone]
            parts = [outputs[place] for outputs in returned if place < len(outputs)]
            near = terms.near
            causes = chain(likely.of_output(goal, parameters, parts, near), likely.of_parts(goal, parts, near))
            _require(rank, f"{when} rank {rank} returns", "", value, goal, causes, terms)


def _require_something(when: str, truth: Pass) -> None:
    """Check that a layer without gradients, such as one that makes targets, returns something other than zeros."""
    __tracebackhide__ = True
    if not any(y.any() for y in truth.outputs):
        raise Inconclusive(f"{when} the whole layer has no gradient and returns zeros, no fault would show")


def _require_buffers(
    when: str, number: int, wanted: Mapping[str, Tensor], everyone: Sequence[Cut], terms: Terms
) -> None:
    __tracebackhide__ = True
    for name, goal in wanted.items():
        held = [cut.passes[number].buffers.get(name) for cut in everyone]
        parts = [part.to(goal.dtype) for part in held if part is not None and part.shape == goal.shape]
        for rank, value in enumerate(held):
            if value is not None and value.shape == goal.shape:
                causes = likely.of_parts(goal, parts, terms.near) if goal.is_floating_point() else ()
                cure = "buffers=False accepts what ranks keep in another way by intention"
                _require(
                    rank, f"{when} rank {rank} holds", f" of buffer {name!r}", value, goal, causes, terms, cure=cure
                )


def _require_parameters(
    when: str, number: int, whole_grads: Tensor, everyone: Sequence[Cut], held: Tensor, terms: Terms
) -> None:
    """Check the gradients of all parameters on all ranks.

    Args:
        when: the beginning of the message.
        number: of the batch.
        whole_grads: the gradient of the whole layer, by the number of the element.
        everyone: the results of each rank.
        held: for each number of an element, how many ranks hold it.
        terms: of the comparison.
    """
    __tracebackhide__ = True
    total = torch.zeros_like(whole_grads)  # the sum over ranks for each element
    for cut in everyone:
        for name, numbers in cut.numbers.items():
            grad = cut.passes[number].parameters_grad[name]
            if grad is not None:
                total.index_add_(0, numbers.flatten(), grad.flatten().to(total.dtype))
    wrong: list[list[str]] = [[] for _ in everyone]
    for rank, cut in enumerate(everyone):
        for name, numbers in cut.numbers.items():
            goal = whole_grads[numbers]
            if terms.off(_or_zeros(cut.passes[number].parameters_grad[name], goal), goal).any():
                wrong[rank].append(name)
    partial_inputs = any(wrong) and _inputs_are_parts(number, everyone, terms)
    for rank, names in enumerate(wrong):
        for name in names:
            numbers = everyone[rank].numbers[name]
            goal = whole_grads[numbers]
            value = _or_zeros(everyone[rank].passes[number].parameters_grad[name], goal)
            others = _namesakes(name, everyone, whole_grads)
            causes = likely.of_parameter(
                value, goal, numbers, total[numbers], held[numbers], len(everyone), others, partial_inputs, terms.near
            )
            where = wrong_on_ranks(wrong, [len(cut.numbers) for cut in everyone])
            what = f" of the gradient of {name!r}"
            more = {"wrong_gradients": where, "cure": _NO_WAY_BACK if _none_leads_back(number, everyone) else None}
            if none := none_on([_none_of(cut, number, numbers) for cut in everyone]):
                more["none_reached"] = f"{none}, in the backward pass"
            _require(rank, f"{when} rank {rank} holds", what, value, goal, causes, terms, **more)


def _namesakes(name: str, everyone: Sequence[Cut], whole_grads: Tensor) -> list[Tensor]:
    """Return the right gradient of that name on each rank.

    The result is empty unless every rank has a parameter of that name, of one shape and with different elements.
    """
    numbers = [cut.numbers[name] for cut in everyone if name in cut.numbers]
    if len(numbers) < len(everyone) or any(one.shape != numbers[0].shape for one in numbers):
        return []
    every = torch.cat([one.flatten() for one in numbers])
    return [whole_grads[one] for one in numbers] if len(set(every.tolist())) == len(every) else []


def _none_of(cut: Cut, number: int, numbers: Tensor) -> list[str]:
    """Return the parameters of a rank that hold some of these elements and that no gradient reached."""
    return [
        name
        for name in cut.passes[number].without_gradient
        if torch.isin(cut.numbers[name], numbers[numbers > 0]).any()
    ]


def _inputs_are_parts(number: int, everyone: Sequence[Cut], terms: Terms) -> bool:
    """Return whether ranks that are given the same input have each a part of its right gradient."""
    for place, goal in enumerate(everyone[0].selected[number][1]):
        if any(not torch.equal(cut.selected[number][1][place], goal) for cut in everyone):
            continue
        parts = [_or_zeros(cut.passes[number].inputs_grad[place], goal) for cut in everyone]
        gradients = everyone[0].passes[number].gradients_of_output
        if any(terms.off(part, goal).any() for part in parts) and likely.are_parts(goal, parts, gradients, terms.near):
            return True
    return False


def _require_inputs(when: str, number: int, everyone: Sequence[Cut], terms: Terms) -> None:
    __tracebackhide__ = True
    several = sum(everyone[0].passes[number].learns) > 1
    cure = (
        _NO_WAY_BACK if _none_leads_back(number, everyone) else _OTHER_INPUTS if several and not terms.marked else None
    )
    for rank, cut in enumerate(everyone):
        goals = cut.selected[number][1]
        for place, goal in enumerate(goals):
            parts = [_or_zeros(one.passes[number].inputs_grad[place], goal) for one in everyone]
            where = f" of the gradient of {f'input {place}' if len(goals) > 1 else 'its input'}"
            value = parts[rank]
            causes = likely.of_input(goal, parts, cut.passes[number].gradients_of_output, terms.near)
            hints = likely.of_the_way_back()
            _require(rank, f"{when} rank {rank} holds", where, value, goal, causes, terms, hints, cure=cure)


def _none_leads_back(number: int, everyone: Sequence[Cut]) -> bool:
    """Return whether no output of any rank leads back to a parameter or an input."""
    return not any(cut.passes[number].leads_back for cut in everyone)


def _require_equal_copies(when: str, number: int, size: int, everyone: Sequence[Cut], terms: Terms) -> None:
    """Check that elements held by several ranks get the same gradient bit for bit.

    The numbers of the whole layer's elements are below ``size``.
    """
    __tracebackhide__ = True
    known = torch.zeros(size, dtype=torch.float64)
    holder = torch.full((size,), -1)
    for rank, cut in enumerate(everyone):
        for name, all_numbers in cut.numbers.items():
            grad = cut.passes[number].parameters_grad[name]
            if grad is None:
                continue
            of_whole = all_numbers.flatten() > 0
            numbers, own = all_numbers.flatten()[of_whole], grad.flatten()[of_whole].double()
            others = holder[numbers]
            differs = (others >= 0) & (others != rank) & (bits(known[numbers]) != bits(own))
            if differs.any():
                raise failure(
                    f"{when} ranks {int(others[differs][0])} and {rank} hold copies of elements of {name!r}, "
                    "whose gradients differ in some bits",
                    likely_cause="each rank adds them in an order of its own: reduce them once, for all",
                    case=terms.facts,
                )
            known[numbers], holder[numbers] = own, rank


def _require(
    rank: int,
    who: str,
    of: str,
    value: Tensor,
    goal: Tensor,
    causes: Iterable[likely.Cause],
    terms: Terms,
    hints: Iterable[likely.Cause] = (),
    /,
    **more: str | None,
) -> None:
    __tracebackhide__ = True
    if not value.is_floating_point() and not value.is_complex():
        value, goal = value.double(), goal.double()
    wrong = terms.off(value, goal)
    if not wrong.any():
        return
    at = first_index(wrong)
    raise failure(
        f"{who} {show(value[at])} at {at}{of}, the whole layer {show(goal[at])}",
        Place(rank, of.removeprefix(" of ") or "output", at, value[at], goal[at]),
        wrong_elements=f"{int(wrong.sum())} of {value.numel()}",
        **more,
        likely_cause=explain(
            value,
            causes,
            likely.multiple(value, goal),
            likely.rounded(value, goal),
            terms.rarer(terms.where, bool(value.isnan().any())),
            likely.undefined(value, goal),
            tolerance=terms.near,
            expected=goal,
            hints=hints,
        ),
        case=terms.facts,
    )


def _flat(layer: nn.Module, values: Mapping[str, Tensor | None]) -> Tensor:
    """Return all elements of the layer's parameters in the order of their numbers. No element has the number 0."""
    parts = [_or_zeros(values[name], parameter).flatten() for name, parameter in layer.named_parameters()]
    return torch.cat([torch.zeros(1, dtype=torch.float64), *parts])


def _or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def _shapes(tensors: Tensors) -> str:
    return ", ".join(f"shape {tuple(each.shape)}" for each in tensors)


def _parameter_of(layer: nn.Module, number: int) -> tuple[str, int, Tensor]:
    """Return the parameter that has the element of this number.

    The result is its name, the number of its first element, and the parameter.

    Raises:
        IndexError: no parameter has the element.
    """
    first = 1
    for name, parameter in layer.named_parameters():
        if number < first + parameter.numel():
            return name, first, parameter
        first += parameter.numel()
    raise IndexError(f"the layer has {first - 1} elements, number {number} is none of them")


def _index(number: int, parameter: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(number), parameter.shape))
