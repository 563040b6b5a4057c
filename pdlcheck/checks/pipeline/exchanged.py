"""The cause of wrong outputs in which two tensors of one shape have changed places on the way to a later stage."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pdlcheck.checks.diagnosis import Candidate
from pdlcheck.checks.pipeline.steps import is_near
from pdlcheck.checks.pipeline.truth import Truth
from pdlcheck.compat.torch.pytree import tree_leaves, tree_map

__all__ = ["tensors_exchanged"]

_MOST = 400  # pairs of tensors to try


def tensors_exchanged(truth: Truth, found: Sequence[Any]) -> Iterator[Candidate[Tensor]]:
    """Yield the cause in which two results of the model, neither computed from the other, are exchanged.

    Args:
        truth: the results of one process.
        found: all outputs of the pipeline.
    """
    results, flipped = _Results(), _Results()
    _outputs(truth, truth.inputs, results)
    _outputs(truth, tree_map(lambda one: one.flip(0), truth.inputs), flipped)
    # What is computed from weights alone is no message.
    changes = [not torch.equal(*pair) for pair in zip(results.values, flipped.values, strict=False)]
    pairs = [
        (one, other)
        for one, other in itertools.combinations([place for place, changed in enumerate(changes) if changed], 2)
        if results.values[one].shape == results.values[other].shape
        and results.values[one].dtype == results.values[other].dtype
    ]
    fits = next((pair for pair in pairs[:_MOST] if _gives(truth, results, pair, found)), None)
    one, other = (results.names[place] for place in fits) if fits else ("", "")
    yield Candidate(
        f"two tensors of one shape are exchanged, {one} and {other}: two messages without tags are received in "
        "another order than they are sent, or layers of one shape are exchanged",
        holds=lambda _: fits is not None,
        short="two tensors of one shape exchanged",
    )


@dataclass
class _Results:
    """The floating tensors that torch's functions return in a forward pass, in order.

    Args:
        values: copies of the results.
        names: the function of each result, with the module that calls it.
        given: the values that replace results, by position.
        independent: whether the second of the replaced results does not change with the first.
    """

    values: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    given: dict[int, Tensor] = field(default_factory=dict)
    independent: bool = True


class _Replacing(TorchFunctionMode):
    """Record the results of a forward pass, or replace those in ``given``."""

    def __init__(self, results: _Results, inside: list[str]) -> None:
        super().__init__()
        self._results, self._inside, self._place = results, inside, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and return its result or the one that is given."""
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or not result.is_floating_point() or not result.dim():
            return result
        if any(result is one for one in args):  # an operation in place
            return result
        place, self._place = self._place, self._place + 1
        if self._results.given:
            if place == max(self._results.given):
                self._results.independent = is_near(result, self._results.values[place])
            return self._results.given.get(place, result)
        self._results.values.append(result.detach().clone())
        name = getattr(func, "__name__", "a function")
        self._results.names.append(f"{name}{f' in {self._inside[-1]!r}' if self._inside[-1] else ''}")
        return result


def _gives(truth: Truth, results: _Results, pair: tuple[int, int], found: Sequence[Any]) -> bool:
    """Return whether the model gives the outputs ``found`` if the results of a pair are exchanged."""
    one, other = pair
    exchanged = _Results(results.values, results.names, {one: results.values[other], other: results.values[one]})
    leaves = _outputs(truth, truth.inputs, exchanged)
    tensors = [(own, given) for own, given in zip(found, leaves, strict=False) if isinstance(given, Tensor)]
    equal = all(isinstance(own, Tensor) and is_near(own, given) for own, given in tensors)
    return exchanged.independent and bool(tensors) and equal


def _outputs(truth: Truth, inputs: Any, results: _Results) -> list[Any]:
    """Run the model forward, and return its outputs; none if it fails."""
    model, inside = copy.deepcopy(truth.model), [""]

    def entering(name: str) -> Callable[..., None]:
        return lambda *_: inside.append(name)

    def leave(*_: object) -> None:
        inside.pop()

    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(entering(name)).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        hooks.enter_context(_Replacing(results, inside))
        try:
            return list(tree_leaves(model(inputs)))
        except Exception:  # a result of the same shape may still have another use
            return []
