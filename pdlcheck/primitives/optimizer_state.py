"""The state of an optimizer as tensors that ranks can average: momentum, and Adam's moments."""

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

HOW = ("capturable", "differentiable", "foreach", "fused", "params")  # options that do not change a step's result
COUNT = "step"  # the name that torch's optimizers give to their number of steps

# position of a parameter -> name of its state -> (whether the state is averaged, its value if not)
Layout = dict[int, dict[str, tuple[bool, Any]]]


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of ``optimizer``, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hyper_parameters(optimizer: Optimizer) -> dict[str, object]:
    """Return the values that must be the same on every rank for equal steps, by a name for messages."""
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
    """Return the options that ``group`` would lose if ``saved`` were loaded: torch replaces all options of a group."""
    return sorted(set(group) - set(saved) - {"initial_lr"})  # a scheduler adds initial_lr and keeps its own copy


class AveragedState:
    """The part of an optimizer's state that ranks average: every floating tensor with the shape of its parameter.

    Other state, such as Adam's count of steps, stays separate on each rank. A rank may have no state of a parameter
    yet, because the parameter never had a gradient there. Such a rank counts as zero and receives the averaged state.

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
        """Return whether this rank's state has other names than at the last average, so that ranks must compare."""
        return self._names() != self._mine

    def average(self, *, somewhere_new: bool) -> None:
        """Average the state over the ranks. Every rank must call it.

        Args:
            somewhere_new: True on every rank if :meth:`is_new` was True on any rank.
        """
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
        """Gather the names of the state on all ranks, and create the state that this rank does not have."""
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
