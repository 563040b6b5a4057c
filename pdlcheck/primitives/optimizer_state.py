"""The state of an optimizer as tensors that ranks can average: momentum, and what Adam keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pdlcheck.primitives.arguments import Members
from pdlcheck.primitives.averages import averages

__all__ = ["AveragedState", "hyper_parameters", "lost_options", "optimizer_parameters"]

HOW = ("capturable", "differentiable", "foreach", "fused", "params")  # how a step is computed, not which
COUNT = "step"  # what torch's optimizers call their number of steps

# position of a parameter -> name of its state -> whether that is averaged, and the value if not
Layout = dict[int, dict[str, tuple[bool, Any]]]


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hyper_parameters(optimizer: Optimizer) -> dict[str, object]:
    """What must be the same on every rank for equal steps, by a name for messages."""
    found: dict[str, object] = {"kind of optimizer": type(optimizer).__name__}
    found["sizes of the optimizer's groups"] = [len(group["params"]) for group in optimizer.param_groups]
    for number, group in enumerate(optimizer.param_groups):
        for name, option in group.items():
            value = option.item() if isinstance(option, Tensor) and option.numel() == 1 else option
            parts = value if isinstance(value, tuple) else (value,)
            if name not in HOW and all(isinstance(part, bool | int | float | str) for part in parts):
                found[f"{name} of the optimizer's group {number}"] = value
    return found


def lost_options(group: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """What a group has and would lose where ``saved`` is loaded in its place: torch replaces all options."""
    return sorted(set(group) - set(saved) - {"initial_lr"})  # a scheduler adds it, and has its own copy


class AveragedState:
    """Averages the state of an optimizer over ranks: every floating tensor of the shape of its parameter.

    What else there is, such as Adam's count of steps, stays each rank's own. A rank that has no state of a parameter
    yet, because it never had a gradient there, counts as zero and gets the state that others have.

    Args:
        optimizer: same parameters in the same order on every rank.
        who: the ranks that take part.
    """

    def __init__(self, optimizer: Optimizer, who: Members) -> None:
        self._optimizer = optimizer
        self._who = who
        self._mine: dict[int, tuple[str, ...]] = {}
        self._known: Layout = {}

    def is_new(self) -> bool:
        """True if this rank's optimizer has other state than at the last average, so that ranks must compare."""
        return self._names() != self._mine

    def average(self, *, somewhere_new: bool) -> None:
        """Call it on every rank; ``somewhere_new`` is True on all if :meth:`is_new` was on any."""
        if somewhere_new:
            self._compare()
        tensors = self._tensors()
        if not tensors:
            return
        means, _ = averages("average of the optimizer's state", tensors, self._who.world_size, self._who.group)
        for name, mean in means.items():
            tensors[name].copy_(mean)

    def _names(self) -> dict[int, tuple[str, ...]]:
        return {position: tuple(sorted(state)) for position, state in self._states().items()}

    def _states(self) -> dict[int, dict[str, Any]]:
        state: Mapping[Tensor, dict[str, Any]] = self._optimizer.state
        parameters = optimizer_parameters(self._optimizer)
        return {position: state[p] for position, p in enumerate(parameters) if state.get(p)}

    def _compare(self) -> None:
        """Learn which state there is on any rank, and take over what this one has not."""
        parameters = optimizer_parameters(self._optimizer)
        mine: Layout = {
            position: {name: _entry(name, value, parameters[position]) for name, value in state.items()}
            for position, state in self._states().items()
        }
        everyone: list[Any] = [None] * self._who.world_size
        dist.all_gather_object(everyone, mine, self._who.group)
        self._known = {}
        for layout in everyone:
            for position, state in layout.items():
                self._known[position] = {**state, **self._known.get(position, {})}
        for position, known in self._known.items():
            parameter = parameters[position]
            state = self._optimizer.state[parameter]
            for name, (is_averaged, value) in known.items():
                if name not in state:
                    state[name] = torch.zeros_like(parameter) if is_averaged else value
        self._mine = self._names()

    def _tensors(self) -> dict[str, Tensor]:
        parameters: Sequence[Tensor] = optimizer_parameters(self._optimizer)
        return {
            f"{name} of parameter {position}": self._optimizer.state[parameters[position]][name]
            for position in sorted(self._known)
            for name in sorted(self._known[position])
            if self._known[position][name][0]
        }


def _entry(name: str, value: Any, parameter: Tensor) -> tuple[bool, Any]:
    is_averaged = name != COUNT and isinstance(value, Tensor) and value.shape == parameter.shape
    is_averaged = is_averaged and (value.is_floating_point() or value.is_complex())
    return is_averaged, None if is_averaged else value
