"""The causes of wrong results of a pipeline, each with the results that it predicts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain, predictions
from pdlcheck.checks.pipeline.counts import counts_in
from pdlcheck.checks.pipeline.steps import (
    RELATIVE,
    Named,
    all_names,
    gradients_of,
    joined_batch,
    samples_in,
    tolerance,
)
from pdlcheck.checks.pipeline.truth import Truth
from pdlcheck.checks.tolerances import Tolerance

__all__ = ["Causes"]

Held = dict[tuple[int, str], Tensor]  # wrong gradients by rank and name
Prediction = Callable[[], Named]


class Causes:
    """The tables of causes for results that differ from those of one process.

    Args:
        truth: the results of one process.
    """

    def __init__(self, truth: Truth) -> None:
        """Keep the results; every cause computes its prediction when it is tried."""
        self.truth = truth

    def diagnose(self, everyone: Sequence[Named], wrong: Sequence[Sequence[str]], *, is_partial: bool) -> Diagnosis:
        """Return the candidates that explain all wrong gradients, or else those of the first wrong rank.

        Args:
            everyone: the gradients of every rank.
            wrong: the names of the wrong gradients of every rank.
            is_partial: whether other gradients are right.
        """
        found = {(rank, name): everyone[rank][name] for rank, names in enumerate(wrong) for name in names}
        first = next(rank for rank, names in enumerate(wrong) if names)
        usual = [*self._usual(is_partial)]

        def tables(held: Held) -> list[Iterable[Candidate[Held]]]:
            return [self._candidates(usual, held), self._candidates(self._in_other_places(self._weights), held)]

        def of_first_rank() -> Iterator[Candidate[Held]]:
            alone = {key: held for key, held in found.items() if key[0] == first}
            diagnosis = self._explain(alone, *tables(alone)) if len(alone) < len(found) else Diagnosis()
            for text in diagnosis.fits:
                words = f"on rank {first} {text}; what is wrong on other ranks is something else"
                yield Candidate.when(words, True)

        own_parts = self._own_parts(everyone, first, wrong[first])
        return self._explain(found, own_parts, *tables(found), of_first_rank(), self._counts(found))

    def _explain(self, found: Held, *tables: Iterable[Candidate[Held]]) -> Diagnosis:
        right = self.truth.gradients
        return explain(
            found,
            *tables,
            tolerance={key: self._tolerance(key[1]) for key in found},
            expected={key: right[key[1]] for key in found},
        )

    def _tolerance(self, name: str) -> Tolerance:
        # A candidate may be n_microbatches times larger than the gradient itself.
        return Tolerance(absolute=tolerance(self.truth.gradients[name], self.truth.count))

    def _candidates(self, causes: Iterable[tuple[str, Prediction]], found: Held) -> Iterator[Candidate[Held]]:
        """Yield candidates that predict what each rank holds of each name."""

        def held(predict: Prediction) -> Held:
            predicted = predict()
            return {key: predicted[key[1]] for key in found if key[1] in predicted}

        for text, predict in causes:
            yield Candidate(text, partial(held, predict))

    def diagnose_loss(self, found: Tensor) -> Diagnosis:
        """Return the candidates that explain a wrong loss."""
        eps = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
        return explain(
            float(found),
            predictions(self._wrong_losses()),
            tolerance=Tolerance(relative=RELATIVE + 4 * eps),
            expected=float(self.truth.loss),
        )

    def _wrong_losses(self) -> Iterator[tuple[str, float]]:
        m, samples, right = self.truth.count, self.truth.samples, float(self.truth.loss)
        yield f"summed over {samples} samples, where one process averages", right * samples
        yield f"averaged over {samples} samples, where one process sums", right / samples
        yield f"not divided by n_microbatches = {m}", right * m
        yield f"divided by n_microbatches = {m} once too often", right / m
        for i, (value, _) in enumerate(self._each if self.truth.can_be_cut else ()):
            yield f"it is that of micro-batch {i} of {m} alone", float(value)
        for text, weights in self._weightings():
            if sum(weights) - max(weights) > 0 or abs(max(weights) - 1) > RELATIVE:  # else one micro-batch alone
                pairs = zip(weights, self._each, strict=True)
                yield text, sum(weight * float(value) for weight, (value, _) in pairs)

    def _own_parts(self, everyone: Sequence[Named], rank: int, names: Sequence[str]) -> Iterator[Candidate[Held]]:
        """Yield the causes in which the sum or the mean over all ranks that hold these parameters is right."""
        holders = [held for held in everyone if set(names) <= set(held)]
        count = len(holders)

        def add_up(factor: float, _: Held) -> bool:
            joined = {name: torch.stack([held[name] for held in holders]).sum(0) * factor for name in names}
            right = self.truth.gradients
            return all(bool(self._tolerance(n).accepts(grad, right[n]).all()) for n, grad in joined.items())

        for text, factor in (("sum", 1.0), ("mean", 1 / count)) if count > 1 else ():
            yield Candidate(
                f"it is this rank's own part: {count} ranks hold the parameter, and the {text} of theirs is right",
                holds=partial(add_up, factor),
            )

    def _usual(self, is_partial: bool) -> Iterator[tuple[str, Prediction]]:
        zero = "it is zero: no gradient came back, or the activation was received without requires_grad"
        yield zero, partial(self._scaled, 0)
        for factor, divisor in ((self.truth.count, "n_microbatches"), (self.truth.samples, "the samples")):
            large, small = f"it is {factor} times too large", f"it is {factor} times too small"
            if is_partial:  # the loss would scale all gradients, so it is not the cause
                where = "on its rank or on the way to it, as other gradients are right"
                large, small = (
                    f"{large}: added so often, or multiplied by {divisor}, {where}",
                    f"{small}: divided by {divisor} {where}",
                )
            else:
                large, small = f"{large}: not divided by {divisor}", f"{small}: divided by {divisor} once too often"
            yield large, partial(self._scaled, factor)
            yield small, partial(self._scaled, 1 / factor)
        if self.truth.before:
            both = [self.truth.gradients, self.truth.before]
            yield "it is the gradient of the step before", lambda: self.truth.before
            yield "the gradient of the step before was added", lambda: _sum(both, [1, 1])
        yield "it is the copy's own part: gradients of the tied copies were not added", self._untied
        for text, weights in self._weightings():
            yield text, partial(_sum, [grads for _, grads in self._each], weights)

    def _scaled(self, factor: float) -> Named:
        return {name: grad * factor for name, grad in self.truth.gradients.items()}

    @cached_property
    def _each(self) -> list[tuple[Tensor, Named]]:
        """Return the loss and the gradients of every micro-batch alone."""
        each = [self.truth.of(self.truth.model, x, y) for x, y in self.truth.parts]
        return [(value, gradients_of(one)) for _, value, one in each]

    @cached_property
    def _shares(self) -> list[float]:
        return [samples_in(x) / self.truth.samples for x, _ in self.truth.parts]

    @cached_property
    def _weights(self) -> list[float]:
        """Return the weight of each micro-batch: its share of the samples if the loss is a mean, 1 if it is a sum."""
        total = sum(float(value) * share for (value, _), share in zip(self._each, self._shares, strict=True))
        is_mean = abs(total - float(self.truth.loss)) < RELATIVE * max(1.0, abs(total))
        return self._shares if is_mean else [1.0] * self.truth.count

    @cached_property
    def _plain_mean_is_right(self) -> bool:
        mean = sum(float(value) for value, _ in self._each) / self.truth.count
        return abs(mean - float(self.truth.loss)) < RELATIVE * max(1.0, abs(mean))

    def _weightings(self) -> Iterator[tuple[str, list[float]]]:
        """Yield wrong weights that micro-batches may have instead.

        Weights that are other ones in other words are left out.
        """
        if not self.truth.can_be_cut:
            return
        m, weights = self.truth.count, self._weights
        if not self._plain_mean_is_right:
            counts = "their samples" if len(set(self._shares)) > 1 else "what the loss divides by, such as tokens"
            yield f"it is the plain mean over micro-batches: weight them with {counts}", [1 / m] * m
            yield "it is the sum over micro-batches of means", [1.0] * m
        for left in range(m):
            kept = [w * (i != left) for i, w in enumerate(weights)]
            yield f"micro-batch {left} of {m} is missing", kept
            if m > 2 and weights[left] != 1:
                yield f"micro-batch {left} of {m} is left out", [w / (1 - weights[left]) for w in kept]
            yield f"every micro-batch is micro-batch {left}", [sum(weights) * (i == left) for i in range(m)]

    def _counts(self, found: Held) -> Iterator[Candidate[Held]]:
        """Yield how often each micro-batch counts, if the gradients are a weighted sum over micro-batches."""
        if not self.truth.can_be_cut:
            return
        names = [name for _, name in found]
        grads = (self.truth.gradients, *(one for _, one in self._each))
        right, *parts = (_flat([each[name] for name in names]) for each in grads)
        text = counts_in(_flat(list(found.values())), right, parts)
        if text is not None:
            yield Candidate.when(text, True)

    def _in_other_places(self, weights: Sequence[float]) -> Iterator[tuple[str, Prediction]]:
        """Yield the gradients of a sequential model with two micro-batches swapped between two of its layers.

        The two have the same number of samples.
        """
        if not self.truth.can_be_cut or not isinstance(self.truth.model, nn.Sequential):
            return
        names = [name for name, _ in self.truth.model.named_children()]
        right = list(range(self.truth.count))
        for one, other in itertools.combinations(right, 2):
            if samples_in(self.truth.parts[one][0]) != samples_in(self.truth.parts[other][0]):
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
                    yield text, partial(self._with_order, cut, weights, read, returned)

    def _with_order(self, cut: int, weights: Sequence[float], read: list[int], returned: list[int]) -> Named:
        """Return the gradients where place k reads activation ``read[k]``.

        Activation k gets gradient ``returned[k]``.
        """
        one = copy.deepcopy(self.truth.model)
        assert isinstance(one, nn.Sequential)  # the caller has checked it
        one.zero_grad()
        sent = [one[:cut](x) for x, _ in self.truth.parts]
        if not all(isinstance(made, Tensor) and made.requires_grad for made in sent):
            return {}
        leaves = [made.detach().requires_grad_() for made in sent]
        for place, (_, targets) in enumerate(self.truth.parts):
            loss = self.truth.loss_of(one[cut:](leaves[read[place]]), targets) * weights[place]
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for place, made in enumerate(sent):
            made.backward(leaves[returned[place]].grad)
        return gradients_of(one)

    def _untied(self) -> Named:
        """Return the gradient that each of the tied names would have alone."""
        values = {name: p.detach().clone().requires_grad_() for name, p in all_names(self.truth.model).items()}
        inputs = joined_batch([x for x, _ in self.truth.parts])
        targets = joined_batch([y for _, y in self.truth.parts])
        out = functional_call(self.truth.model, values, (inputs,), tie_weights=False)
        grads = torch.autograd.grad(self.truth.loss_of(out, targets), list(values.values()), allow_unused=True)
        return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(values.items(), grads, strict=True)}


def _sum(parts: Sequence[Named], weights: Sequence[float]) -> Named:
    return {name: torch.stack([p[name] * w for p, w in zip(parts, weights, strict=True)]).sum(0) for name in parts[0]}


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.flatten() for one in tensors])
