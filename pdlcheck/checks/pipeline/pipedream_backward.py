"""The fault of PipeDream in which a backward pass runs at other weights than its forward pass."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor, nn
from torch.func import functional_call

from pdlcheck.checks.diagnosis import Candidate
from pdlcheck.checks.pipeline.pipedream_rules import Held, Rule, Simulation
from pdlcheck.checks.pipeline.steps import Named

__all__ = ["at_latest_weights"]

_TEXT = (
    "backward passes run at the latest weights, forward passes do not: keep for each micro-batch the weights of its "
    "forward pass"
)


def at_latest_weights(simulation: Simulation, right: Rule, held: Held) -> list[list[Candidate[Held]]]:
    """Return two tables of causes: all stages run a micro-batch backward at their latest weights, or one stage does.

    Args:
        simulation: the model, its stages, and the micro-batches.
        right: the rule of forward passes.
        held: the final weights by rank and name, which each cause predicts.
    """
    ways = list(_ways_to_cut(simulation))
    count = len(simulation.stages)

    def ends(stages: Sequence[nn.Sequential], newest: Sequence[int]) -> Held:
        weights = _run(simulation, stages, right, newest)
        return {(rank, name): weights[name] for rank, name in held}

    return [
        [Candidate(_TEXT, partial(ends, way, range(count))) for way in ways],
        [
            Candidate(f"in stage {stage} alone {_TEXT}", partial(ends, way, [stage]))
            for stage in range(count)
            for way in ways
        ],
    ]


def _ways_to_cut(simulation: Simulation) -> Iterator[list[nn.Sequential]]:
    """Yield the layers of each stage.

    A layer without parameters may belong to the stage before it or after it, so there are two ways. There is none if
    the stages are not parts of a sequential model, one after the other.
    """
    model = copy.deepcopy(simulation.model)
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        return
    layers = list(model.named_children())
    owners = [
        {stage for stage, names in enumerate(simulation.stages) for name in names if name.startswith(f"{layer}.")}
        for layer, _ in layers
    ]
    known = [stage for stages in owners for stage in stages]
    if len(layers) < len(model) or any(len(stages) > 1 for stages in owners) or known != sorted(known):
        return
    for forward in (True, False):
        order = range(len(layers)) if forward else reversed(range(len(layers)))
        stage, parts = known[0] if forward else known[-1], dict[int, list[tuple[str, nn.Module]]]()
        for place in order:
            stage = next(iter(owners[place]), stage)
            parts.setdefault(stage, []).insert(len(parts.get(stage, [])) if forward else 0, layers[place])
        if len(parts) == len(simulation.stages):
            yield [nn.Sequential(OrderedDict(parts[stage])) for stage in sorted(parts)]


def _run(simulation: Simulation, stages: Sequence[nn.Sequential], right: Rule, newest: Sequence[int]) -> Named:
    """Return the final weights if the stages in ``newest`` run a micro-batch backward at their latest weights.

    Such a stage recomputes its output from the input of its forward pass.
    """
    latest = {name: p.detach().clone().requires_grad_() for name, p in simulation.model.named_parameters()}
    steps = [simulation.optimizer([latest[name] for name in names]) for names in simulation.stages]
    history = [_copies(latest)]
    for i, (inputs, targets) in enumerate(simulation.parts):
        received: list[Tensor] = [inputs]
        versions = [history[right.version(i, stage)] for stage in range(len(stages))]
        for layers, weights in zip(stages, versions, strict=True):
            received.append(_output(layers, weights, received[-1]).detach())
        grad: Tensor | None = None
        for stage in reversed(range(len(stages))):
            used = _copies(history[-1] if stage in newest else versions[stage])
            leaf = received[stage].detach().requires_grad_(stage > 0)
            for weight in used.values():
                weight.requires_grad_()
            out = _output(stages[stage], used, leaf)
            if stage == len(stages) - 1:
                simulation.loss(out, targets).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            elif grad is not None:
                out.backward(grad)  # type: ignore[no-untyped-call]
            grad = leaf.grad
            for name in simulation.stages[stage]:
                latest[name].grad = used[name].grad
        for one in steps:
            one.step()
        history.append(_copies(latest))
    return history[-1]


def _output(layers: nn.Sequential, weights: Named, inputs: Tensor) -> Tensor:
    own = {name: weights[name] for name, _ in layers.named_parameters()}
    output: Tensor = functional_call(layers, own, (inputs,))
    return output


def _copies(weights: Named) -> Named:
    return {name: weight.detach().clone() for name, weight in weights.items()}
