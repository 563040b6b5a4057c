"""The optimizer steps of a program that owns its loop: what each one starts from, and the state to put back."""

from __future__ import annotations

import copy
import hashlib
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pdlcheck.checks.checkpoint.unsaved_state import STREAMS
from pdlcheck.checks.evidence.optimizers import settings_of
from pdlcheck.checks.rank_results import bits
from pdlcheck.checks.state import plain_name

__all__ = [
    "GRADIENTS",
    "INPUTS",
    "RANDOM",
    "RATES",
    "STATE",
    "WEIGHTS",
    "Kept",
    "Recorder",
    "StepRecord",
    "digest_of",
    "recording",
]

WEIGHTS = "the weights"
INPUTS = "the data that the model is given"
RANDOM = "the random numbers"
RATES = "the settings of the optimizer"
STATE = "the state of the optimizer"
GRADIENTS = "the gradients"


@dataclass
class StepRecord:
    """One step of an optimizer: digests of everything that it starts from.

    Args:
        optimizer: the name of its class.
        weights: of each parameter, by name.
        state: of the optimizer, for each parameter.
        settings: of each group of parameters, such as the learning rate.
        gradients: of each parameter.
        inputs: the first tensors that a module is given in the forward passes of the step; None if there are none.
        random: the random streams at the first forward pass of the step, by name.
    """

    optimizer: str
    weights: dict[str, str]
    state: dict[str, str]
    settings: list[dict[str, Any]]
    gradients: dict[str, str] = field(default_factory=dict)
    inputs: str | None = None
    random: dict[str, str] = field(default_factory=dict)

    def differing(self, other: StepRecord) -> list[str]:
        """Return what differs; random numbers last, because a program may draw none."""
        pairs = {
            WEIGHTS: (self.weights, other.weights),
            INPUTS: (self.inputs, other.inputs),
            RATES: (self.settings, other.settings),
            STATE: (self.state, other.state),
            GRADIENTS: (self.gradients, other.gradients),
            RANDOM: (self.random, other.random),
        }
        return [name for name, (one, two) in pairs.items() if one != two]


@dataclass
class Kept:
    """The values of one step, to put them back in another run: optimizer state, random streams; settings of all steps.

    Args:
        state: of the optimizer, in the order of the parameters.
        random: the random streams at the first forward pass.
        settings: of the groups, for this step and each further one.
    """

    state: list[dict[str, Any]] = field(default_factory=list)
    random: dict[str, Any] = field(default_factory=dict)
    settings: list[list[dict[str, Any]]] = field(default_factory=list)


@dataclass
class Recorder:
    """The steps of this thread's optimizers during the block of :func:`recording`.

    Args:
        keep_from: the number of the step whose values are kept; None to keep none.
        kept: the values of that step, or those to put back in the first step.
        names: what of them to put back: ``STATE``, ``RATES``, or random streams.
    """

    keep_from: int | None = None
    kept: Kept = field(default_factory=Kept)
    names: tuple[str, ...] = ()
    steps: list[StepRecord] = field(default_factory=list)
    _labels: dict[int, str] = field(default_factory=dict)
    _inputs: list[str] = field(default_factory=list)
    _random: dict[str, str] = field(default_factory=dict)
    _depth: int = 0

    def before_forward(self, inputs: Any) -> None:
        """Record the inputs of the first module of a forward pass."""
        if not torch.is_grad_enabled() or not any(isinstance(one, Tensor) for one in inputs):
            return
        if not self._inputs:
            number = len(self.steps)
            for name in self.names if number == 0 else ():
                if name in STREAMS:
                    STREAMS[name][1](copy.deepcopy(self.kept.random[name]))
            states = {name: get() for name, (get, _) in STREAMS.items()}
            self._random = {name: digest_of(state) for name, state in states.items()}
            if number == self.keep_from:
                self.kept.random = copy.deepcopy(states)
            self._inputs.append(digest_of([one for one in inputs if isinstance(one, Tensor)]))

    def before_step(self, optimizer: Optimizer) -> None:
        """Put back what this run shall have, and record what the step starts from."""
        self._depth += 1
        if self._depth > 1:  # a step that another one calls, as in ZeRO
            return
        number = len(self.steps)
        parameters = _parameters(optimizer)
        if STATE in self.names and number == 0:
            for parameter, state in zip(parameters, self.kept.state, strict=True):
                optimizer.state[parameter] = copy.deepcopy(state)
        if RATES in self.names and number < len(self.kept.settings):
            for group, goal in zip(optimizer.param_groups, self.kept.settings[number], strict=True):
                group.update(goal)
        if number == self.keep_from:
            self.kept.state = [copy.deepcopy(dict(optimizer.state.get(one, {}))) for one in parameters]
        settings = [settings_of(group) for group in optimizer.param_groups]
        if self.keep_from is not None and number >= self.keep_from:
            self.kept.settings.append(settings)
        self.steps.append(
            StepRecord(
                type(optimizer).__name__,
                weights={self._label(one): digest_of(one) for one in parameters},
                state={self._label(one): digest_of(optimizer.state.get(one, {})) for one in parameters},
                settings=settings,
            )
        )

    def after_step(self, optimizer: Optimizer) -> None:
        """Record what the step was given; a closure may have computed it in the step."""
        self._depth -= 1
        if self._depth:
            return
        record = self.steps[-1]
        record.gradients = {self._label(one): digest_of(one.grad) for one in _parameters(optimizer)}
        record.inputs = self._inputs[0] if self._inputs else None
        record.random = self._random
        self._inputs, self._random = [], {}

    def name_parameters(self, modules: Mapping[str, Any]) -> None:
        """Give the parameters their names in these modules, in place of numbers."""
        names = {
            self._labels[id(parameter)]: f"parameter {plain_name(name)!r}"
            for module in modules.values()
            if isinstance(module, nn.Module)
            for name, parameter in module.named_parameters()
            if id(parameter) in self._labels
        }
        for record in self.steps:
            for what in ("weights", "state", "gradients"):
                setattr(record, what, {names.get(label, label): one for label, one in getattr(record, what).items()})

    def _label(self, parameter: Tensor) -> str:
        return self._labels.setdefault(id(parameter), f"parameter number {len(self._labels)} of the optimizer")


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Record the optimizer steps of this thread during the block. Ranks may be threads of one process."""
    own = threading.get_ident()

    def of_own_thread(function: Callable[..., None], *args: Any) -> None:
        if threading.get_ident() == own:
            function(*args)

    hooks = [
        register_module_forward_pre_hook(lambda _, inputs: of_own_thread(recorder.before_forward, inputs)),
        register_optimizer_step_pre_hook(lambda one, *_: of_own_thread(recorder.before_step, one)),
        register_optimizer_step_post_hook(lambda one, *_: of_own_thread(recorder.after_step, one)),
    ]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def digest_of(value: Any) -> str:
    """Return a digest of tensors, numbers, and containers of them."""
    made = hashlib.blake2b(digest_size=16)
    _feed(made.update, value)
    return made.hexdigest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    feed = partial(_feed, update)
    if isinstance(value, Tensor):
        held = value.detach()
        held = held.to_local() if hasattr(held, "to_local") else held
        held = (held if held.layout == torch.strided else held.to_dense()).cpu()
        update(f"{held.dtype} {tuple(held.shape)}".encode())
        update(bits(held.reshape(-1)).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, one in value.items():
            update(repr(key).encode())
            feed(one)
    elif isinstance(value, list | tuple):
        update(str(len(value)).encode())
        for one in value:
            feed(one)
    else:
        update(pickle.dumps(value))
