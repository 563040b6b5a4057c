"""The steps of optimizers during a training: the gradients that they are given, and their settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from pdlcheck.checks.conditions import BUCKETS
from pdlcheck.checks.evidence.exchanges import Exchange, exchange_of, record_exchanges
from pdlcheck.checks.state import plain_name

__all__ = ["GivenToOptimizer", "conditions_of", "record_optimizers", "settings_of"]

_KINDS = (bool, float, int, tuple)
_IMPLEMENTATION = frozenset({"capturable", "differentiable", "foreach", "fused"})  # the steps are the same


@dataclass
class GivenToOptimizer:
    """One parameter in the steps of the optimizer that updates it.

    Args:
        optimizer: the name of the optimizer's class.
        elements: the number of elements of the parameter.
        settings: of the parameter's group, for each step.
        gradient: in the last step; None if there was none.
        is_torchs: whether the optimizer is one of ``torch.optim``. Others may scale gradients, or copy them, on their
            own in a step.
        passes: the gradients that single backward passes gave to the last step, before ranks exchanged them; empty if
            they were not asked for.
        exchanges: what the rank exchanged with others in the last step and in the one before, if there is one. The last
            step goes on to the end of the training. Empty if unknown.
        is_resumed: whether the parameter had other values before the first step than at the start of the training, as
            after a checkpoint is loaded. Its earlier steps are unknown then.
    """

    optimizer: str
    elements: int
    settings: list[Mapping[str, Any]] = field(default_factory=list)
    gradient: Tensor | None = None
    is_torchs: bool = True
    passes: Sequence[Tensor] = ()
    exchanges: Sequence[Exchange] = ()
    is_resumed: bool = False

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return len(self.settings)


def conditions_of(given: Mapping[str, GivenToOptimizer]) -> dict[str, bool]:
    """Return the conditions that the steps of optimizers can meet, and whether they have met them."""
    met = {}
    exchanged = [sum(exchange.calls.values()) for one in given.values() for exchange in one.exchanges]
    if any(exchanged):
        met[BUCKETS] = max(exchanged) > 2
    if any("initial_lr" in settings for one in given.values() for settings in one.settings):  # of a scheduler
        rates = [{settings.get("lr") for settings in one.settings} for one in given.values()]
        met["a change of the learning rate"] = any(len(each) > 1 for each in rates)
    return met


@contextmanager
def record_optimizers(model: nn.Module, *, passes: bool = False) -> Iterator[dict[str, GivenToOptimizer]]:
    """Record every step of an optimizer that updates a parameter of ``model``, during the block, by parameter.

    A parameter is found by its identity. So the copies that a wrapper trains are not recorded, nor are DTensors, whose
    gradients lie on several ranks. Where the step of one optimizer calls that of another, as ZeRO's does, both are one.
    With ``passes``, the gradients of single backward passes are recorded, too.
    """
    given: dict[str, GivenToOptimizer] = {}
    running: list[tuple[Optimizer, RemovableHandle, set[str]]] = []  # with its parameters; each one calls the next
    passed: defaultdict[str, list[Tensor]] = defaultdict(list)
    starts: defaultdict[str, list[int]] = defaultdict(lambda: [0])  # of each step and the next, in the operations
    begins = {id(one): one.detach().clone() for one in model.parameters() if not (one.is_meta or is_lazy(one))}

    def record(optimizer: Optimizer, number: int, again: bool) -> None:
        names = {id(one): f"parameter {plain_name(name)!r}" for name, one in model.named_parameters()}
        for group in optimizer.param_groups:
            settings = settings_of(group)
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None or hasattr(parameter, "full_tensor"):
                    continue
                if name not in given:
                    given[name] = GivenToOptimizer("", parameter.numel(), is_resumed=_differs(parameter, begins))
                one = given[name]
                if again or any(name in outer for _, _, outer in running[:number]):
                    one.settings.pop()
                    starts[name].pop()
                running[number][2].add(name)
                one.optimizer = type(optimizer).__name__
                one.is_torchs = type(optimizer).__module__.startswith("torch.optim.")
                one.settings.append(settings)
                one.gradient = _copy(parameter.grad, getattr(optimizer, "grad_scale", None))
                one.passes = passed.pop(name, ()) or one.passes
                starts[name].append(len(posted or ()))

    def record_now_or_after_the_closure(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        number = len(running) - 1
        closure = args[1] if args[1:] else kwargs.get("closure")
        if closure is None:
            record(optimizer, number, again=False)
            return None
        calls = count()

        def recorded() -> Any:  # the gradients are there when the closure ends
            result = closure()
            record(optimizer, number, again=next(calls) > 0)
            return result

        if args[1:]:
            return (args[0], recorded, *args[2:]), kwargs
        return args, {**kwargs, "closure": recorded}

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # an own hook of the optimizer, made now, runs after those that the user has given it: they may change gradients
        running.append((optimizer, optimizer.register_step_pre_hook(record_now_or_after_the_closure), set()))

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        while running:
            other, hook, _ = running.pop()
            hook.remove()
            if other is optimizer:
                break

    def record_pass(name: str, gradient: Tensor) -> None:
        copy = _copy(gradient, None)
        assert copy is not None
        passed[name].append(copy)

    hooks = [register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)]
    for name, parameter in model.named_parameters() if passes else ():
        if parameter.requires_grad:
            of_one = partial(record_pass, f"parameter {plain_name(name)!r}")
            hooks.append(parameter.register_hook(of_one))  # type: ignore[no-untyped-call]
    try:
        with record_exchanges() as posted:
            yield given
        if posted is not None:
            between = cache(lambda start, end: exchange_of(posted[start:end]))
            for name, one in given.items():
                *earlier, start, _ = starts[name]
                one.exchanges = [between(start, None), *(between(before, start) for before in earlier[-1:])]
    finally:
        for hook in (*hooks, *(hook for _, hook, _ in running)):
            hook.remove()


def _differs(parameter: Tensor, begins: Mapping[int, Tensor]) -> bool:
    begin = begins.get(id(parameter))
    return begin is not None and not torch.equal(begin.to(parameter.device, parameter.dtype), parameter.detach())


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of parameters that change its steps, such as the learning rate."""
    return {key: _plain(value) for key, value in group.items() if _is_setting(key, value)}


def _is_setting(key: str, value: Any) -> bool:
    return isinstance(value, (*_KINDS, Tensor)) and key not in _IMPLEMENTATION


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _copy(gradient: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """Return a copy on the CPU, without the scale that a fused optimizer removes in its step."""
    if gradient is None:
        return None
    held = gradient.detach()
    held = (held if held.layout == torch.strided else held.to_dense()).cpu()
    return held.clone() if scale is None else held / scale.cpu()
