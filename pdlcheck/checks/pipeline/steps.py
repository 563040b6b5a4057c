"""What ranks of a pipeline hold after each step, and how numbers of it are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pdlcheck.checks.message import failure, first_index, made_by_start, name_of, show
from pdlcheck.checks.state import whole

__all__ = [
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


@dataclass(frozen=True)
class Taken:
    """What one rank holds after a step: gradients and weights by name, and what its step returned."""

    gradients: Named
    weights: Named
    loss: Tensor | None
    outputs: Any


def train(
    start: Start, model: nn.Module, batches: Sequence[Batch], optimizer: Callable[..., Optimizer] | None
) -> list[Taken]:
    """On every rank: a step for each batch."""
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
    __tracebackhide__ = True
    names = {name for one in taken for name in one.weights}
    known = all_names(model)
    if strange := sorted(names - set(known)):
        raise failure(f"{when} a rank holds {strange[0]!r}, a name that the model does not have", case=facts)
    held = {id(known[name]) for name in names}
    for name, parameter in known.items():
        if id(parameter) not in held:
            raise failure(f"{when} no rank holds {name!r}", case=facts)


def require_near(who: str, what: str, found: Tensor, goal: Tensor, **details: object) -> None:
    __tracebackhide__ = True
    if is_near(found, goal):
        return
    at = first_index(~((found - goal).abs() <= tolerance(goal)))
    raise failure(f"{who} with {show(found[at])} at {at} of {what}, right is {show(goal[at])}", **details)


def is_near(found: Tensor, goal: Tensor) -> bool:
    return found.shape == goal.shape and bool(((found - goal).abs() <= tolerance(goal)).all())


def tolerance(goal: Tensor, factor: float = 1.0) -> float:
    """How far a number may be off ``factor`` times one of ``goal``."""
    return RELATIVE * factor * (float(goal.abs().max()) if goal.numel() else 0.0) + ABSOLUTE


def gradients_of(module: nn.Module) -> Named:
    return {
        name: whole(torch.zeros_like(p)) if p.grad is None else whole(p.grad) for name, p in all_names(module).items()
    }


def all_names(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def named_weights(module: nn.Module) -> Named:
    return {name: p.detach() for name, p in all_names(module).items()}


def split_batch(batch: Any, count: int) -> list[Any]:
    leaves, form = tree_flatten(batch)
    columns = (one.tensor_split(count) for one in leaves)
    return [tree_unflatten(list(parts), form) for parts in zip(*columns, strict=True)]


def joined_batch(parts: Sequence[Any]) -> Any:
    columns = zip(*(tree_leaves(part) for part in parts), strict=True)
    return tree_unflatten([torch.cat(column) for column in columns], tree_flatten(parts[0])[1])


def samples_in(batch: Any) -> int:
    return len(tree_leaves(batch)[0])


def in_float64(value: Any) -> Any:
    """A batch whose floating tensors are float64: a tensor, or tensors in tuples, lists and dicts."""
    for leaf in tree_leaves(value):
        if not isinstance(leaf, Tensor) or not leaf.dim():
            raise ValueError(f"a batch is tensors whose first dimension is samples, got {type(leaf).__name__} {leaf!r}")
    return tree_map(lambda one: one.double() if one.is_floating_point() else one, value)


def on_cpu(value: Any) -> Any:
    return tree_map(lambda one: one.detach().cpu() if isinstance(one, Tensor) else one, value)


def _result(who: str, returned: Any) -> tuple[Tensor | None, Any]:
    if returned is None:
        return None, None
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(f"step of {who} must return (loss, outputs), or None, got {type(returned).__name__}")
    loss, outputs = returned
    return torch.tensor(loss, dtype=torch.float64) if isinstance(loss, float | int) else loss, outputs
