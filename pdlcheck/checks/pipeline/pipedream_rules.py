"""Rules for the weight versions of micro-batches, and a simulation of them: one process, one micro-batch at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from pdlcheck.checks.diagnosis import Candidate
from pdlcheck.checks.pipeline.steps import Batch, Loss, Named

__all__ = ["Held", "Rule", "Simulation", "rules_of"]

Held = dict[tuple[int, str], Tensor]  # weights by rank and name


@dataclass(frozen=True)
class Rule:
    """The weight versions and the scale of gradients in a stage.

    Args:
        text: a description of the rule.
        version: ``version(i, s)`` is the number of updates in the weights with which stage ``s`` computes micro-batch
            ``i``.
        scale: the factor of gradients.
    """

    text: str
    version: Callable[[int, int], int]
    scale: float = 1.0


def rules_of(n_stages: int, n_microbatches: int, *, vertical_sync: bool) -> tuple[Rule, list[Rule]]:
    """Return PipeDream's rule, and other rules that a pipeline may follow instead."""

    def stashed(i: int, s: int) -> int:
        return max(0, i - (n_stages - s) + 1)

    def vertical(i: int, s: int) -> int:
        return stashed(i, 0)

    own = Rule("weights are stashed, without vertical sync", stashed)
    other = Rule("versions are those of stage 0: vertical sync", vertical)
    right, unasked = (other, own) if vertical_sync else (own, other)
    return right, [
        unasked,
        Rule("every micro-batch waits for the one before: there is no pipeline", lambda i, s: i),
        Rule("weights are those of the start for all micro-batches", lambda i, s: 0),
        Rule("versions are one update too old", lambda i, s: max(0, right.version(i, s) - 1)),
        Rule(f"gradients are divided by n_microbatches = {n_microbatches}", right.version, 1 / n_microbatches),
    ]


@dataclass(frozen=True)
class Simulation:
    """The training of a pipeline, simulated in one process.

    Args:
        model: the model as it starts.
        stages: the names of the parameters of each stage.
        loss: mean over a micro-batch.
        parts: the micro-batches.
        optimizer: makes the optimizer of a stage.
    """

    model: nn.Module
    stages: Sequence[Sequence[str]]
    loss: Loss
    parts: Sequence[Batch]
    optimizer: Callable[[list[Tensor]], Optimizer]

    def run(self, rules: Sequence[Rule]) -> list[Named]:
        """Return the weights at the start and after each micro-batch, if stage s follows ``rules[s]``."""
        latest = {name: p.detach().clone().requires_grad_() for name, p in self.model.named_parameters()}
        # Work on a copy, because functional_call leaves other tensors in a layer that occurs twice.
        model = copy.deepcopy(self.model)
        steps = [self.optimizer([latest[name] for name in names]) for names in self.stages]
        history = [{name: p.detach().clone() for name, p in latest.items()}]
        for i, (inputs, targets) in enumerate(self.parts):
            used = {
                name: history[rule.version(i, stage)][name].clone().requires_grad_()
                for stage, (names, rule) in enumerate(zip(self.stages, rules, strict=True))
                for name in names
            }
            value = self.loss(functional_call(model, used, (inputs,)), targets)
            value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for names, rule in zip(self.stages, rules, strict=True):
                for name in names:
                    grad = used[name].grad
                    latest[name].grad = None if grad is None else grad * rule.scale
            for one in steps:
                one.step()
            history.append({name: p.detach().clone() for name, p in latest.items()})
        return history

    def others(self, right: Rule, rules: Sequence[Rule], held: Held) -> list[list[Candidate[Held]]]:
        """Return two tables of causes: all stages follow another rule, or one stage does.

        Args:
            right: the rule of the other stages.
            rules: the other rules.
            held: the final weights by rank and name, which each cause predicts.
        """
        n_stages = len(self.stages)

        def ends(rules: Sequence[Rule]) -> Held:
            weights = self.run(rules)[-1]
            return {(rank, name): weights[name] for rank, name in held}

        def mixed(rule: Rule, stage: int) -> list[Rule]:
            return [rule if one == stage else right for one in range(n_stages)]

        return [
            [Candidate(rule.text, partial(ends, [rule] * n_stages)) for rule in rules],
            [
                Candidate(f"in stage {stage} alone {rule.text}", partial(ends, mixed(rule, stage)))
                for stage in range(n_stages if n_stages > 1 else 0)
                for rule in rules
            ],
        ]
