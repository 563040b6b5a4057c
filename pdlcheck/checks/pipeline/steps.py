"""The state of a pipeline's ranks after each step, and the comparison of their numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.checks.message import Place, failure, first_index, made_by_start, name_of, show
from pdlcheck.checks.state import whole
from pdlcheck.checks.tolerances import Tolerance
from pdlcheck.compat.torch.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "NEAR",
    "RELATIVE",
    "Batch",
    "Loss",
    "Named",
    "Start",
    "Step",
    "Taken",
    "all_names",
    "gradients_of",
    "in_float64",
    "is_near",
    "joined_batch",
    "named_weights",
    "on_cpu",
    "require_all_held",
    "require_near",
    "samples_in",
    "split_batch",
    "tolerance",
    "train",
]

Loss = Callable[[Any, Any], Tensor]
Step = Callable[[Any, Any], "tuple[Tensor | None, Any] | None"]
Start = Callable[[nn.Module], tuple[nn.Module, Step]]
Named = dict[str, Tensor]
Batch = tuple[Any, Any]

# Sums of a few thousand float64 terms in another order agree to 1e-13 of their terms; one sample in a thousand with a
# wrong weight moves them by 1e-3.
RELATIVE = 1e-9
ABSOLUTE = 1e-12
NEAR = Tolerance(relative=RELATIVE, absolute=ABSOLUTE)


@dataclass(frozen=True)
class Taken:
    """The state of one rank after a step: gradients and weights by name, and the values that its step returned."""

    gradients: Named
    weights: Named
    loss: Tensor | None
    outputs: Any


def train(
    start: Start, model: nn.Module, batches: Sequence[Batch], optimizer: Callable[..., Optimizer] | None
) -> list[Taken]:
    """Run on every rank: take a step for each batch, and return the state after each."""
    torch.manual_seed(dist.get_rank() + 1)
    module, step = made_by_start(start(copy.deepcopy(model)), "module", "step")
    params = list(module.parameters())
    steps = optimizer(params) if optimizer and params else None
    taken = []
    for inputs, targets in batches:
        module.zero_grad()
        loss, outputs = _result(name_of(start), step(inputs, targets))
        gradients = gradients_of(module)
        if steps:
            steps.step()
        weights = {name: whole(p) for name, p in module.named_parameters()}
        taken.append(Taken(gradients, weights, None if loss is None else loss.detach().cpu(), on_cpu(outputs)))
    return taken


def require_all_held(when: str, taken: Sequence[Taken], model: nn.Module, facts: str) -> None:
    """Check that the ranks together hold every parameter of ``model``, and no other names."""
    __tracebackhide__ = True
    names = {name for one in taken for name in one.weights}
    known = all_names(model)
    if strange := sorted(names - set(known)):
        raise failure(f"{when} a rank holds {strange[0]!r}, a name that the model does not have", case=facts)
    held = {id(known[name]) for name in names}
    for name, parameter in known.items():
        if id(parameter) not in held:
            raise failure(f"{when} no rank holds {name!r}", case=facts)


def require_near(
    who: str, what: str, found: Tensor, goal: Tensor, rank: int | None = None, /, **details: object
) -> None:
    """Check that ``found`` equals ``goal`` within the tolerance.

    Args:
        who: the beginning of the message, with its verb.
        what: the name of the tensor.
        found: the tensor under test.
        goal: the right tensor.
        rank: the rank that holds ``found``.
        **details: further lines of the message.

    Raises:
        AssertionError: names the first wrong index and both values.
    """
    __tracebackhide__ = True
    if is_near(found, goal):
        return
    at = first_index(~((found - goal).abs() <= tolerance(goal)))
    raise failure(
        f"{who} with {show(found[at])} at {at} of {what}, right is {show(goal[at])}",
        Place(rank, what, at, found[at], goal[at]),
        **details,
    )


def is_near(found: Tensor, goal: Tensor) -> bool:
    """Return whether two tensors have one shape and are equal within the tolerance."""
    return found.shape == goal.shape and bool(((found - goal).abs() <= tolerance(goal)).all())


def tolerance(goal: Tensor, factor: float = 1.0) -> float:
    """Return the allowed error of numbers that are up to ``factor`` times as large as those of ``goal``."""
    return RELATIVE * factor * (float(goal.abs().max()) if goal.numel() else 0.0) + ABSOLUTE


def gradients_of(module: nn.Module) -> Named:
    """Return whole copies of all gradients by name, with zeros for None."""
    return {
        name: whole(torch.zeros_like(p)) if p.grad is None else whole(p.grad) for name, p in all_names(module).items()
    }


def all_names(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters under all their names, tied ones more than once."""
    return dict(module.named_parameters(remove_duplicate=False))


def named_weights(module: nn.Module) -> Named:
    """Return the weights under all their names, without a copy."""
    return {name: p.detach() for name, p in all_names(module).items()}


def split_batch(batch: Any, count: int) -> list[Any]:
    """Split every tensor of ``batch`` into ``count`` micro-batches."""
    leaves, form = tree_flatten(batch)
    columns = (one.tensor_split(count) for one in leaves)
    return [tree_unflatten(list(parts), form) for parts in zip(*columns, strict=True)]


def joined_batch(parts: Sequence[Any]) -> Any:
    """Join micro-batches into one batch, along the first dimension."""
    columns = zip(*(tree_leaves(part) for part in parts), strict=True)
    return tree_unflatten([torch.cat(column) for column in columns], tree_flatten(parts[0])[1])


def samples_in(batch: Any) -> int:
    """Return the number of samples of ``batch``."""
    return len(tree_leaves(batch)[0])


def in_float64(value: Any) -> Any:
    """Return a batch with its floating tensors in float64. A batch is a tensor, or tensors in tuples, lists and dicts.

    Raises:
        ValueError: a leaf is not a tensor whose first dimension is samples.
    """
    for leaf in tree_leaves(value):
        if not isinstance(leaf, Tensor) or not leaf.dim():
            raise ValueError(f"a batch is tensors whose first dimension is samples, got {type(leaf).__name__} {leaf!r}")
    return tree_map(lambda one: one.double() if one.is_floating_point() else one, value)


def on_cpu(value: Any) -> Any:
    """Return ``value`` with its tensors detached and on the CPU."""
    return tree_map(lambda one: one.detach().cpu() if isinstance(one, Tensor) else one, value)


def _result(who: str, returned: Any) -> tuple[Tensor | None, Any]:
    if returned is None:
        return None, None
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(f"step of {who} must return (loss, outputs), or None, got {type(returned).__name__}")
    loss, outputs = returned
    return torch.tensor(loss, dtype=torch.float64) if isinstance(loss, float | int) else loss, outputs
