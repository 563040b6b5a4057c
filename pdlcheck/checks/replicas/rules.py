"""The reference of local SGD and similar rules: all replicas in one process, in plain loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.checks.state import device_of, whole

__all__ = ["Course", "Rule", "Trace", "alternatives", "backward", "look", "simulate", "with_other_buffers"]

Trace = list[dict[str, Tensor]]  # the state of one rank after each of its steps, and after it has finished
MakeOptimizer = Callable[..., Optimizer]


@dataclass(frozen=True)
class Course:
    """The training to simulate: the model as it starts, its optimizer, and the number of steps of each rank."""

    model: nn.Module
    optimizer: MakeOptimizer
    steps: tuple[int, ...]
    finish: bool
    seed: int


@dataclass(frozen=True)
class Rule:
    """The times at which replicas synchronise, and the way in which they do.

    Args:
        models_every: models are averaged after every k-th step; None: never, except at the end of uneven steps.
        first_round: the first of these steps, counted from 1 after the synchronous ones; None for the k-th.
        gradients_every: gradients are averaged before every k-th step.
        synchronous_steps: number of steps at the start with averaged gradients.
        momentum, buffers: their treatment in a round.
        integer_buffers: the treatment of integers whose mean is no integer, where buffers are averaged; with None they
            have no right value.
        outer: rate, momentum and Nesterov of the outer optimizer.
        nodes: groups of ranks whose gradients are averaged in each step.
        before, divide, first_only, reference_stays, sum_gradients: faults of a wrong implementation.
    """

    models_every: int | None
    gradients_every: int | None = None
    synchronous_steps: int = 0
    momentum: str = "keep"
    buffers: str = "broadcast"
    integer_buffers: str | None = None
    outer: tuple[float, float, bool] | None = None
    nodes: tuple[tuple[int, ...], ...] = ()
    first_round: int | None = None
    before: bool = False
    divide: bool = True
    first_only: bool = False
    reference_stays: bool = False
    sum_gradients: bool = False

    @property
    def first(self) -> int:
        """Return the step after which models are averaged first, counted from 1 after the synchronous ones."""
        return self.first_round or self.models_every or 1

    def meets(self, step: int) -> bool:
        """Return whether models are averaged at ``step``, counted from 0."""
        since = step + 1 - self.synchronous_steps - self.first
        return self.models_every is not None and since >= 0 and since % self.models_every == 0


def alternatives(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """Yield the rules that a wrong implementation may follow instead of ``rule``, with descriptions."""
    if rule.models_every is not None:
        yield "models are never averaged", replace(rule, models_every=None)
        if rule.models_every > 1:
            yield "models are averaged after every step", replace(rule, models_every=1, first_round=None)
        yield from _other_phases(rule, rule.models_every)
        yield "models are averaged before the step, not after it", replace(rule, before=True)
        yield "models are added: the sum is not divided by the number of ranks", replace(rule, divide=False)
        yield "every rank takes the model of rank 0: it is copied, not averaged", replace(rule, first_only=True)
        for policy, text in (
            ("keep", "each rank keeps its own momentum, which momentum='keep' accepts"),
            ("average", "the optimizer's state is averaged, which momentum='average' accepts"),
            ("reset", "the optimizer's state is dropped in each round, which momentum='reset' accepts"),
            ("first", "every rank takes the momentum of rank 0: it is copied, not averaged"),
            ("first moments", "only some of the optimizer's state is averaged"),
            ("sum", "the optimizer's state is added over ranks, not averaged"),
            (
                "zeros",
                "the optimizer's state is set to 0 in each round, not dropped: Adam's count of steps goes on, "
                "SGD damps the next step",
            ),
        ):
            if policy != rule.momentum:
                yield text, replace(rule, momentum=policy)
        yield from with_other_buffers(rule)
    if rule.outer is not None:
        lr, momentum, nesterov = rule.outer
        yield (
            "the outer gradient has the wrong sign: it is reference - mean",
            replace(rule, outer=(-lr, momentum, nesterov)),
        )
        yield (
            "the reference stays what it was: it is the model after the outer step",
            replace(rule, reference_stays=True),
        )
        yield "there is no outer step: the mean is taken as it is", replace(rule, outer=None)
        yield "the outer momentum is missing", replace(rule, outer=(lr, 0.0, False))
        yield "the outer momentum is (or is not) Nesterov's", replace(rule, outer=(lr, momentum, not nesterov))
    if rule.synchronous_steps:
        yield "the first steps are not synchronous", replace(rule, synchronous_steps=0)
        yield "there is one synchronous step too many", replace(rule, synchronous_steps=rule.synchronous_steps + 1)
        yield "there is one synchronous step too few", replace(rule, synchronous_steps=rule.synchronous_steps - 1)
    if rule.nodes:
        yield "gradients are not synchronised within a node", replace(rule, nodes=())
    if rule.gradients_every is not None:
        yield "gradients are never synchronised", replace(rule, gradients_every=None)
        yield "gradients are synchronised in every step", replace(rule, gradients_every=1)
        yield "gradients are added, not averaged", replace(rule, sum_gradients=True)


def _other_phases(rule: Rule, every: int) -> Iterator[tuple[str, Rule]]:
    def steps(first: int) -> str:
        return f"{first}, {first + every}, ..."

    kind = "local steps" if rule.synchronous_steps else "steps"
    near = {rule.first - 1: " one step too early,", rule.first + 1: " one step too late,"}
    for first in dict.fromkeys([*near, *range(1, rule.first + 2 * every)]):
        if first not in (0, rule.first):
            found = f"after {kind} {steps(first)} and not {steps(rule.first)}, which first_round={first} accepts"
            yield f"models are averaged{near.get(first, '')} {found}", replace(rule, first_round=first)
    for other in (every - 1, every + 1):
        if other > 1:
            yield f"models are averaged after every {other} steps, not {every}", replace(rule, models_every=other)


def with_other_buffers(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """Yield ``rule`` with the other treatments of buffers, with descriptions."""
    for policy, text in (
        ("keep", "each rank keeps its own buffers: they drift apart, which buffers='keep' accepts"),
        ("average", "buffers are averaged, which buffers='average' accepts"),
        ("broadcast", "every rank takes the buffers of rank 0, which buffers='broadcast' accepts"),
    ):
        if policy != rule.buffers:
            yield text, replace(rule, buffers=policy)
    for policy, text in (
        ("keep", "each rank keeps its own integer buffers"),
        ("broadcast", "every rank takes the integer buffers of rank 0"),
        ("round", "means of integer buffers are rounded"),
        ("truncate", "means of integer buffers are truncated"),
    ):
        if rule.integer_buffers is not None and policy != rule.integer_buffers:
            yield f"{text}, which integer_buffers={policy!r} accepts", replace(rule, integer_buffers=policy)


def backward(course: Course, model: nn.Module, rank: int, step: int) -> None:
    """Compute the gradient of ``rank`` in its ``step``. Every rank has other samples in every step."""
    generator = torch.Generator().manual_seed((course.seed * 1009 + step) * 64 + rank)
    inputs = torch.randn(4, 2, generator=generator, dtype=torch.float64).to(device_of(model))
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).sin() + rank)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def look(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return copies of a replica's tensors: parameters, buffers, and optimizer state in a parameter's shape."""
    held: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        held[f"parameter {name!r}"] = whole(parameter)
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                held[f"{key} of {name!r}"] = whole(value)
    for name, buffer in model.named_buffers():
        held[f"buffer {name!r}"] = whole(buffer)
    return held


def simulate(course: Course, rule: Rule) -> list[Trace]:
    """Train all replicas of ``course`` by ``rule``, and return the trace of each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a batch of four is too small for two threads, which would wait for each other
    try:
        return _Simulation(course, rule).run()
    finally:
        torch.set_num_threads(threads)


class _Simulation:
    def __init__(self, course: Course, rule: Rule) -> None:
        self.course, self.rule = course, rule
        self.ranks = range(len(course.steps))
        self.models = [copy.deepcopy(course.model) for _ in self.ranks]
        self.optimizers = [course.optimizer(model.parameters()) for model in self.models]
        self.traces: list[Trace] = [[] for _ in self.ranks]
        self.reference = [p.detach().clone() for p in course.model.parameters()]
        self.velocity = [torch.zeros_like(p) for p in self.reference]
        self.without_mean: set[str] = set()  # integer buffers that differed between ranks when they were averaged

    def run(self) -> list[Trace]:
        unmet = False
        for step in range(max(self.course.steps, default=0)):
            active = [rank for rank in self.ranks if step < self.course.steps[rank]]
            for rank in active:
                backward(self.course, self.models[rank], rank, step)
            moving = self._synchronise(step, active)
            meets = self.rule.meets(step)
            if meets and self.rule.before:
                self._meet()
            for rank in moving:
                self.optimizers[rank].step()
            if meets and not self.rule.before:
                self._meet()
            unmet = step >= self.rule.synchronous_steps and not meets
            for rank in active:
                self.traces[rank].append(self._look(rank))
        if self.course.finish:
            if unmet:
                self._meet()
            for rank in self.ranks:
                self.traces[rank].append(self._look(rank))
        return self.traces

    def _look(self, rank: int) -> dict[str, Tensor]:
        """Return the state of a replica, with NaN as the value of an integer buffer that has no right one."""
        held = look(self.models[rank], self.optimizers[rank])
        return held | {
            name: torch.full(held[name].shape, math.nan, dtype=torch.float64)
            for name in (f"buffer {name!r}" for name in self.without_mean)
        }

    def _synchronise(self, step: int, active: Sequence[int]) -> list[int]:
        """Average gradients as the rule requires, and return the ranks that take the step."""
        rule = self.rule
        if step < rule.synchronous_steps:
            parts: list[Sequence[int]] = [self.ranks]
        elif rule.gradients_every is not None and (step + 1) % rule.gradients_every == 0:
            parts = [self.ranks]
        else:
            parts = list(rule.nodes) or [[rank] for rank in self.ranks]
        moving: list[int] = []
        for part in parts:
            givers = [rank for rank in part if rank in active]
            if not givers:
                continue
            moving += part
            if len(part) > 1:
                self._average_gradients(part, givers)
        return moving

    def _average_gradients(self, part: Sequence[int], givers: Sequence[int]) -> None:
        for place in zip(*(self.models[rank].parameters() for rank in part), strict=True):
            grads = [p.grad for rank, p in zip(part, place, strict=True) if rank in givers]
            there = [grad for grad in grads if grad is not None]
            for parameter in place if there else ():  # a frozen parameter has none
                parameter.grad = torch.stack(there).sum(0) / (1 if self.rule.sum_gradients else len(givers))

    @torch.no_grad()
    def _meet(self) -> None:
        rule = self.rule
        count = len(self.ranks)
        columns = list(zip(*(model.parameters() for model in self.models), strict=True))
        for position, place in enumerate(columns):
            total = place[0].clone()
            for parameter in place[1:]:
                total += parameter
            goal = place[0].clone() if rule.first_only else total / count if rule.divide else total
            if rule.outer is not None and place[0].requires_grad:
                goal = self._outer_step(position, goal)
            for parameter in place:
                parameter.copy_(goal)
        names = [name for name, _ in self.models[0].named_buffers()]
        for name, *buffers in zip(names, *(model.buffers() for model in self.models), strict=True):
            if rule.buffers == "keep":
                continue
            goal = buffers[0].clone() if rule.buffers == "broadcast" else self._mean_of(name, buffers)
            for buffer in buffers if goal is not None else ():
                buffer.copy_(goal)
        self._meet_with_momentum(columns)

    def _mean_of(self, name: str, buffers: Sequence[Tensor]) -> Tensor | None:
        """Return what a round that averages buffers puts in the place of each; None if each rank keeps its own."""
        mean = torch.stack([buffer.double() for buffer in buffers]).sum(0) / len(buffers)
        first, way = buffers[0], self.rule.integer_buffers
        if first.is_floating_point() or first.is_complex() or all(torch.equal(one, first) for one in buffers):
            return mean
        if way is None:
            self.without_mean.add(name)
        ways = {"keep": None, "broadcast": first.clone(), "round": mean.round()}
        return ways.get(way or "", mean.trunc())

    def _outer_step(self, position: int, mean: Tensor) -> Tensor:
        assert self.rule.outer is not None
        lr, momentum, nesterov = self.rule.outer
        gradient = self.reference[position] - mean
        self.velocity[position] = momentum * self.velocity[position] + gradient
        way = gradient + momentum * self.velocity[position] if nesterov else self.velocity[position]
        goal = self.reference[position] - lr * way
        if not self.rule.reference_stays:
            self.reference[position] = goal.clone()
        return goal

    def _meet_with_momentum(self, columns: Sequence[tuple[nn.Parameter, ...]]) -> None:
        policy = self.rule.momentum
        if policy == "reset":
            self.optimizers = [self.course.optimizer(model.parameters()) for model in self.models]
        if policy not in ("average", "first", "first moments", "sum", "zeros"):
            return
        for place in columns:
            states: list[dict[str, Any]] = [o.state[p] for o, p in zip(self.optimizers, place, strict=True)]
            names = sorted({name for state in states for name in state})
            for number, name in enumerate(name for name in names if name != "step"):
                if policy == "first moments" and number:
                    continue
                values = [state.get(name, torch.zeros_like(place[0])) for state in states]
                count = {"first": 1, "sum": 1, "zeros": math.inf}.get(policy, len(values))
                mean = (values[0] if policy == "first" else torch.stack(values).sum(0)) / count
                for state in states:
                    state[name] = mean.clone()
            for state in states:
                if "step" in names and "step" not in state:
                    state["step"] = next(other["step"].clone() for other in states if "step" in other)
