"""The result of one process on the whole batch, and the results that the usual faults of a pipeline lead to."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pdlcheck.checks.pipeline.counts import counts_in
from pdlcheck.checks.pipeline.steps import (
    RELATIVE,
    Loss,
    Named,
    all_names,
    gradients_of,
    is_near,
    joined_batch,
    on_cpu,
    samples_in,
    split_batch,
    tolerance,
)
from pdlcheck.compat.torch.pytree import tree_leaves

__all__ = ["Truth"]


class Truth:
    """The result of one process on the whole batch, and candidates for the likely cause of a wrong result.

    Args:
        model: the model before the step.
        loss: of outputs and targets.
        inputs: of the whole batch.
        targets: of the whole batch.
        n_microbatches: the number of parts of the batch.
        before: the gradients of the step before; empty in the first step.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, inputs: Any, targets: Any, n_microbatches: int, before: Named
    ) -> None:
        """Run the model once on the whole batch."""
        self.model, self.loss_of, self.before, self.count = model, loss, before, n_microbatches
        self.inputs, self.targets = inputs, targets
        self.samples = samples_in(inputs)
        self.outputs, self.loss, one = self._of(model, inputs, targets)
        self.gradients = gradients_of(one)
        self.have_none = {name for name, p in all_names(one).items() if p.grad is None}  # optimizers skip these
        self.parts = list(zip(split_batch(inputs, n_microbatches), split_batch(targets, n_microbatches), strict=True))

    def _of(self, model: nn.Module, inputs: Any, targets: Any) -> tuple[Any, Tensor, nn.Module]:
        one = copy.deepcopy(model)
        one.zero_grad()
        outputs = one(inputs)
        value = self.loss_of(outputs, targets)
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return on_cpu(outputs), value.detach(), one

    def near(self, name: str, found: Tensor, candidate: Tensor) -> bool:
        """Return whether ``found`` equals ``candidate`` within the tolerance of the gradient ``name``."""
        # A candidate may be n_microbatches times larger than the gradient itself.
        return bool(((found - candidate).abs() <= tolerance(self.gradients[name], self.count)).all())

    @cached_property
    def unfit(self) -> str | None:
        """Return why a right pipeline may differ from one process on the whole batch, or None.

        The model may draw random numbers, or mix the samples of a batch.
        """
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(1)
            again = on_cpu(copy.deepcopy(self.model)(self.inputs))
            if not _are_near(again, self.outputs):
                return "gets other outputs each time: the model draws random numbers, as dropout does"
            leaves = tree_leaves(self.outputs)
            each = [isinstance(one, Tensor) and one.dim() and len(one) == self.samples for one in leaves]
            if not all(each) or not self._can_be_cut:
                return None
            joined = joined_batch([on_cpu(copy.deepcopy(self.model)(x)) for x, _ in self.parts])
        mixes = "gets other outputs from micro-batches: the model mixes samples, as batch norm does"
        return None if _are_near(joined, self.outputs) else mixes

    def cause(self, everyone: Sequence[Named], wrong: Sequence[Sequence[str]], *, is_partial: bool) -> str | None:
        """Return the first candidate that explains all wrong gradients, or those of the first wrong rank.

        Args:
            everyone: the gradients of every rank.
            wrong: the names of the wrong gradients of every rank.
            is_partial: whether other gradients are right.
        """
        rank, names = next((rank, names) for rank, names in enumerate(wrong) if names)
        holders = [held for held in everyone if set(names) <= set(held)]
        if own_part := self._own_part(everyone[rank], names, holders):
            return own_part
        alone = None
        for text, candidate in self._candidates(is_partial):
            explains = [
                all(name in candidate and self.near(name, found[name], candidate[name]) for name in names)
                for found, names in zip(everyone, wrong, strict=True)
            ]
            if all(explains):
                return text
            if explains[rank] and alone is None:
                alone = f"on rank {rank} {text}; what is wrong on other ranks is something else"
        return alone or self._counts(everyone, wrong)

    def cause_of_loss(self, found: Tensor) -> str | None:
        """Return the candidate that explains a wrong loss, or None."""
        m, samples, right, slack = self.count, self.samples, float(self.loss), RELATIVE + 4 * _eps(found)
        candidates = [
            (f"summed over {samples} samples, where one process averages", right * samples),
            (f"averaged over {samples} samples, where one process sums", right / samples),
            (f"not divided by n_microbatches = {m}", right * m),
            (f"divided by n_microbatches = {m} once too often", right / m),
        ]
        for i, (value, _) in enumerate(self._each if self._can_be_cut else ()):
            candidates.append((f"it is that of micro-batch {i} of {m} alone", float(value)))
        for text, weights in self._weightings():
            pairs = zip(weights, self._each, strict=True)
            candidates.append((text, sum(weight * float(value) for weight, (value, _) in pairs)))
        return next((text for text, value in candidates if abs(float(found) - value) < slack * abs(value)), None)

    def _own_part(self, found: Named, wrong: Sequence[str], holders: Sequence[Named]) -> str | None:
        """Return a text if the sum or the mean over all ``holders`` of these parameters is right."""
        count = len(holders)
        for text, factor in (("sum", 1.0), ("mean", 1 / count)) if count > 1 else ():
            joined = {name: torch.stack([held[name] for held in holders]).sum(0) * factor for name in wrong}
            if all(self.near(name, grad, self.gradients[name]) for name, grad in joined.items()):
                return (
                    f"it is this rank's own part: {count} ranks hold the parameter, and the {text} of theirs is right"
                )
        return None

    def _candidates(self, is_partial: bool) -> Iterator[tuple[str, Named]]:
        yield "it is zero: no gradient came back, or the activation was received without requires_grad", self._scaled(0)
        for factor, divisor in ((self.count, "n_microbatches"), (self.samples, "the samples")):
            large, small = f"it is {factor} times too large", f"it is {factor} times too small"
            if is_partial:  # the loss would scale all gradients, so it is not the cause
                where = "on its rank or on the way to it, as other gradients are right"
                large, small = (
                    f"{large}: added so often, or multiplied by {divisor}, {where}",
                    f"{small}: divided by {divisor} {where}",
                )
            else:
                large, small = f"{large}: not divided by {divisor}", f"{small}: divided by {divisor} once too often"
            yield large, self._scaled(factor)
            yield small, self._scaled(1 / factor)
        if self.before:
            yield "it is the gradient of the step before", self.before
            yield "the gradient of the step before was added", _sum([self.gradients, self.before], [1, 1])
        yield "it is the copy's own part: gradients of the tied copies were not added", self._untied()
        for text, weights in self._weightings():
            yield text, _sum([grads for _, grads in self._each], weights)
        if self._can_be_cut:
            yield from self._in_other_places(self._weights)

    def _scaled(self, factor: float) -> Named:
        return {name: grad * factor for name, grad in self.gradients.items()}

    @property
    def _can_be_cut(self) -> bool:
        """Return whether every micro-batch has samples. Not every model accepts a micro-batch without samples."""
        return self.samples >= self.count

    @cached_property
    def _each(self) -> list[tuple[Tensor, Named]]:
        """Return the loss and the gradients of every micro-batch alone."""
        each = [self._of(self.model, x, y) for x, y in self.parts]
        return [(value, gradients_of(one)) for _, value, one in each]

    @cached_property
    def _shares(self) -> list[float]:
        return [samples_in(x) / self.samples for x, _ in self.parts]

    @cached_property
    def _weights(self) -> list[float]:
        """Return the weight of each micro-batch: its share of the samples if the loss is a mean, 1 if it is a sum."""
        total = sum(float(value) * share for (value, _), share in zip(self._each, self._shares, strict=True))
        is_mean = abs(total - float(self.loss)) < RELATIVE * max(1.0, abs(total))
        return self._shares if is_mean else [1.0] * self.count

    def _weightings(self) -> Iterator[tuple[str, list[float]]]:
        """Yield wrong weights that micro-batches may have instead."""
        if not self._can_be_cut:
            return
        m, weights = self.count, self._weights
        counts = "their samples" if len(set(self._shares)) > 1 else "what the loss divides by, such as tokens"
        yield f"it is the plain mean over micro-batches: weight them with {counts}", [1 / m] * m
        yield "it is the sum over micro-batches of means", [1.0] * m
        for left in range(m):
            kept = [w * (i != left) for i, w in enumerate(weights)]
            yield f"micro-batch {left} of {m} is missing", kept
            yield f"micro-batch {left} of {m} is left out", [w / (1 - weights[left] or 1) for w in kept]
            yield f"every micro-batch is micro-batch {left}", [sum(weights) * (i == left) for i in range(m)]

    def _counts(self, everyone: Sequence[Named], wrong: Sequence[Sequence[str]]) -> str | None:
        if not self._can_be_cut:
            return None
        names = [name for spoilt in wrong for name in spoilt]
        found = [held[name] for held, spoilt in zip(everyone, wrong, strict=True) for name in spoilt]
        right, *parts = ([grads[name] for name in names] for grads in (self.gradients, *(one for _, one in self._each)))
        return counts_in(_flat(found), _flat(right), [_flat(part) for part in parts])

    def _in_other_places(self, weights: Sequence[float]) -> Iterator[tuple[str, Named]]:
        """Yield the gradients of a sequential model with two micro-batches swapped between two of its layers.

        The two have the same number of samples.
        """
        if not isinstance(self.model, nn.Sequential):
            return
        names = [name for name, _ in self.model.named_children()]
        right = list(range(self.count))
        for one, other in itertools.combinations(right, 2):
            if samples_in(self.parts[one][0]) != samples_in(self.parts[other][0]):
                continue
            swapped = [{one: other, other: one}.get(place, place) for place in right]
            for cut in range(1, len(names)):
                where = f"of micro-batches {one} and {other} changed places between layers"
                there, back = f"{names[cut - 1]!r} and {names[cut]!r}", f"{names[cut]!r} and {names[cut - 1]!r}"
                for text, read, returned in (
                    (f"activations {where} {there}", swapped, swapped),
                    (f"activations {where} {there}", swapped, right),
                    (f"gradients {where} {back}", right, swapped),
                ):
                    yield text, self._with_order(cut, weights, read, returned)

    def _with_order(self, cut: int, weights: Sequence[float], read: list[int], returned: list[int]) -> Named:
        """Return the gradients where place k reads activation ``read[k]``.

        Activation k gets gradient ``returned[k]``.
        """
        one = copy.deepcopy(self.model)
        assert isinstance(one, nn.Sequential)  # the caller has checked it
        one.zero_grad()
        sent = [one[:cut](x) for x, _ in self.parts]
        if not all(isinstance(made, Tensor) and made.requires_grad for made in sent):
            return {}
        leaves = [made.detach().requires_grad_() for made in sent]
        for place, (_, targets) in enumerate(self.parts):
            loss = self.loss_of(one[cut:](leaves[read[place]]), targets) * weights[place]
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for place, made in enumerate(sent):
            made.backward(leaves[returned[place]].grad)
        return gradients_of(one)

    def _untied(self) -> Named:
        """Return the gradient that each of the tied names would have alone."""
        values = {name: p.detach().clone().requires_grad_() for name, p in all_names(self.model).items()}
        inputs = joined_batch([x for x, _ in self.parts])
        targets = joined_batch([y for _, y in self.parts])
        out = functional_call(self.model, values, (inputs,), tie_weights=False)
        grads = torch.autograd.grad(self.loss_of(out, targets), list(values.values()), allow_unused=True)
        return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(values.items(), grads, strict=True)}


def _sum(parts: Sequence[Named], weights: Sequence[float]) -> Named:
    return {name: torch.stack([p[name] * w for p, w in zip(parts, weights, strict=True)]).sum(0) for name in parts[0]}


def _are_near(found: Any, goal: Any) -> bool:
    pairs = zip(tree_leaves(found), tree_leaves(goal), strict=True)
    return all(is_near(one.nan_to_num(), other.nan_to_num()) for one, other in pairs if isinstance(one, Tensor))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.flatten() for one in tensors])


def _eps(found: Tensor) -> float:
    return torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
