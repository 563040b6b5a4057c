"""What one process gets from the whole batch, and what each usual fault of a pipeline would make of it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pdlcheck.checks.pipeline_steps import (
    RELATIVE,
    Loss,
    Named,
    all_names,
    gradients_of,
    joined_batch,
    on_cpu,
    samples_in,
    split_batch,
    tolerance,
)

__all__ = ["Truth"]


class Truth:
    """One process on the whole batch, and what it would hold with one thing wrong."""

    def __init__(
        self, model: nn.Module, loss: Loss, inputs: Any, targets: Any, n_microbatches: int, before: Named
    ) -> None:
        self.model, self.loss_of, self.before, self.count = model, loss, before, n_microbatches
        self.samples = samples_in(inputs)
        self.outputs, self.loss, one = self._of(model, inputs, targets)
        self.gradients = gradients_of(one)
        self.have_none = {name for name, p in all_names(one).items() if p.grad is None}  # optimizers leave these alone
        self.parts = list(zip(split_batch(inputs, n_microbatches), split_batch(targets, n_microbatches), strict=True))

    def _of(self, model: nn.Module, inputs: Any, targets: Any) -> tuple[Any, Tensor, nn.Module]:
        one = copy.deepcopy(model)
        one.zero_grad()
        outputs = one(inputs)
        value = self.loss_of(outputs, targets)
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return on_cpu(outputs), value.detach(), one

    def near(self, name: str, found: Tensor, candidate: Tensor) -> bool:
        # a candidate may be n_microbatches times larger than the gradient itself
        return bool(((found - candidate).abs() <= tolerance(self.gradients[name], self.count)).all())

    def cause(self, found: Named, wrong: Sequence[str], holders: Sequence[Named]) -> str | None:
        """The first candidate that explains all wrong gradients.

        ``holders``: the gradients of every rank that holds these parameters.
        """
        count = len(holders)
        for text, factor in (("sum", 1.0), ("mean", 1 / count)) if count > 1 else ():
            joined = {name: torch.stack([held[name] for held in holders]).sum(0) * factor for name in wrong}
            if all(self.near(name, grad, self.gradients[name]) for name, grad in joined.items()):
                return (
                    f"it is this rank's own part: {count} ranks hold the parameter, and the {text} of theirs is right"
                )
        for text, candidate in self._candidates():
            if all(name in candidate and self.near(name, found[name], candidate[name]) for name in wrong):
                return text
        return None

    def cause_of_loss(self, factor: float) -> str | None:
        """What a loss that is ``factor`` times too large tells."""
        m, samples = self.count, self.samples
        for text, value in (
            (f"summed over {samples} samples, where one process averages", samples),
            (f"averaged over {samples} samples, where one process sums", 1 / samples),
            (f"not divided by n_microbatches = {m}", m),
            (f"divided by n_microbatches = {m} once too often", 1 / m),
        ):
            if abs(factor - value) < RELATIVE * value:
                return text
        return None

    def _candidates(self) -> Iterator[tuple[str, Named]]:
        m, samples = self.count, self.samples

        def scaled(factor: float) -> Named:
            return {name: grad * factor for name, grad in self.gradients.items()}

        yield "it is zero: no gradient came back, or the activation was received without requires_grad", scaled(0)
        yield f"it is {m} times too large: not divided by n_microbatches", scaled(m)
        yield f"it is {m} times too small: divided by n_microbatches once too often", scaled(1 / m)
        yield f"it is {samples} times too large: not divided by the samples", scaled(samples)
        yield f"it is {samples} times too small: divided by the samples once too often", scaled(1 / samples)
        if self.before:
            yield "it is the gradient of the step before", self.before
            yield "the gradient of the step before was added", _sum([self.gradients, self.before], [1, 1])
        yield "it is the copy's own part: gradients of the tied copies were not added", self._untied()
        each = [self._of(self.model, x, y) for x, y in self.parts]
        grads, sizes = [gradients_of(one) for _, _, one in each], [samples_in(x) for x, _ in self.parts]
        total = sum(float(value) * n / samples for (_, value, _), n in zip(each, sizes, strict=True))
        means = abs(total - float(self.loss)) < RELATIVE * max(1.0, abs(total))
        weights = [n / samples if means else 1.0 for n in sizes]
        counts = "their samples" if len(set(sizes)) > 1 else "what the loss divides by, such as tokens"
        yield f"it is the plain mean over micro-batches: weight them with {counts}", _sum(grads, [1 / m] * m)
        yield "it is the sum over micro-batches of means", _sum(grads, [1.0] * m)
        for left in range(m):
            kept = [w * (i != left) for i, w in enumerate(weights)]
            yield f"micro-batch {left} of {m} is missing", _sum(grads, kept)
            yield f"micro-batch {left} of {m} is left out", _sum(grads, [w / (1 - weights[left] or 1) for w in kept])
            yield (
                f"every micro-batch is micro-batch {left}",
                _sum(grads, [sum(weights) * (i == left) for i in range(m)]),
            )
        yield from self._in_other_places(weights)

    def _in_other_places(self, weights: Sequence[float]) -> Iterator[tuple[str, Named]]:
        """Of a sequential model: two micro-batches of one size change places between two of its layers."""
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
        """The gradient where place k reads activation ``read[k]``, and activation k gets gradient ``returned[k]``."""
        one = copy.deepcopy(self.model)
        assert isinstance(one, nn.Sequential)  # the caller has looked
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
        """The gradient that each of the tied names would have alone."""
        values = {name: p.detach().clone().requires_grad_() for name, p in all_names(self.model).items()}
        inputs = joined_batch([x for x, _ in self.parts])
        targets = joined_batch([y for _, y in self.parts])
        out = functional_call(self.model, values, (inputs,), tie_weights=False)
        grads = torch.autograd.grad(self.loss_of(out, targets), list(values.values()), allow_unused=True)
        return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(values.items(), grads, strict=True)}


def _sum(parts: Sequence[Named], weights: Sequence[float]) -> Named:
    return {name: torch.stack([p[name] * w for p, w in zip(parts, weights, strict=True)]).sum(0) for name in parts[0]}
