"""The split of a sequential model into stages: by layers, by parameters, or by measured time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from pdlcheck.compat.torch.modules import submodules
from pdlcheck.primitives.arguments import require_at_least
from pdlcheck.primitives.pipeline.batches import packed_as

__all__ = ["layer_names", "layer_times_s", "split_costs", "split_model"]

Layers = list[tuple[str, nn.Module]]


def split_model(
    model: nn.Sequential,
    n_stages: int,
    *,
    by: Literal["layers", "parameters", "time"] | Sequence[int] = "parameters",
    sample: Any = None,
) -> list[list[str]]:
    """Return the layer names of each stage: stages are runs of layers, and the largest cost is as small as possible.

    No communication: give every rank the same model. If times are measured, let one rank decide for all.

    Args:
        model: its children are the layers.
        n_stages: at least 1, at most as many as there are layers.
        by: the cost of a layer. ``"layers"``: 1. ``"parameters"``: their number. ``"time"``: seconds of a forward and a
            backward pass of ``sample``. A layer without parameters stays with the one before it, except with
            ``"layers"``. Or a list: the positions of the layers with which stages 1, 2, ... begin.
        sample: input for ``"time"``.

    Returns:
        For each stage the names of its layers.

    Raises:
        TypeError: ``model`` is not an ``nn.Sequential``.
        ValueError: there are fewer layers than stages; a stage would have no parameters; positions do not rise;
            ``"time"`` is given without ``sample``.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(1, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 1))
        >>> split_model(model, 2)
        [['0', '1'], ['2', '3', '4']]
        >>> split_model(model, 2, by=[4])
        [['0', '1', '2', '3'], ['4']]
    """
    layers = layer_names(model)
    require_at_least("split_model", "n_stages", n_stages, 1)
    if n_stages > len(layers):
        raise ValueError(f"split_model got n_stages={n_stages} for {len(layers)} layers; take at most {len(layers)}")
    if not isinstance(by, str):
        starts = _starts(by, n_stages, len(layers))
    elif by == "layers":
        starts = split_costs([1.0] * len(layers), n_stages)
    elif by in ("parameters", "time"):
        costs = layer_times_s(model, sample) if by == "time" else [float(_numel(layer)) for _, layer in layers]
        runs = _runs(layers)
        if n_stages > len(runs):
            raise ValueError(
                f"split_model got n_stages={n_stages}, but only {len(runs)} of {len(layers)} layers have parameters, "
                f"and a stage needs some; take at most {len(runs)}"
            )
        starts = [runs[at] for at in split_costs([sum(costs[a:b]) for a, b in _spans(runs, len(layers))], n_stages)]
    else:
        raise ValueError(f"split_model knows by='layers', 'parameters', 'time' or positions, got {by!r}")
    stages = [layers[a:b] for a, b in _spans(starts, len(layers))]
    for index, stage in enumerate(stages):
        if not any(_numel(layer) for _, layer in stage):
            kinds = ", ".join(f"{name} ({type(layer).__name__})" for name, layer in stage)
            raise ValueError(
                f"split_model: stage {index} has no parameters, its layers are {kinds}; "
                "take fewer stages, by='parameters', or cut elsewhere"
            )
    return [[name for name, _ in stage] for stage in stages]


def layer_names(model: nn.Module) -> Layers:
    """Return the layers of a sequential model with their names. A layer that is used twice appears twice.

    Raises:
        TypeError: ``model`` is not an ``nn.Sequential``.
        ValueError: it has no layers.
    """
    if not isinstance(model, nn.Sequential):
        raise TypeError(
            f"a pipeline takes an nn.Sequential, got {type(model).__name__}; "
            "put its layers into one, in the order in which they are called"
        )
    # named_children lists a layer that occurs twice only once.
    layers = list(zip(submodules(model), model, strict=True))
    if not layers:
        raise ValueError("a pipeline needs layers, got an empty nn.Sequential")
    return layers


def layer_times_s(model: nn.Sequential, sample: Any, *, rounds: int = 3) -> list[float]:
    """Return the seconds that each layer takes for a forward and a backward pass of ``sample``, the best of ``rounds``.

    Gradients and random numbers do not change. Buffers do (running statistics include ``sample``).

    Raises:
        ValueError: no ``sample``.
    """
    if sample is None:
        raise ValueError("split_model needs sample, an input of the model, to measure times")
    layers = layer_names(model)
    best = [float("inf")] * len(layers)
    kept = [parameter.grad for parameter in model.parameters()]
    with torch.random.fork_rng():
        for _ in range(rounds):
            x = sample
            for position, (_, layer) in enumerate(layers):
                x = _leaves(x)
                start = _now(x)
                y = layer(x)
                outs = [t for t in (y if isinstance(y, tuple | list) else [y]) if t.requires_grad]
                if outs:
                    torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])
                best[position] = min(best[position], _now(y) - start)
                x = y
    for parameter, grad in zip(model.parameters(), kept, strict=True):
        parameter.grad = grad
    return best


def split_costs(costs: Sequence[float], n_parts: int) -> list[int]:
    """Return the first positions of ``n_parts`` non-empty runs whose largest sum is as small as possible.

    Example:
        >>> split_costs([5, 1, 1, 1, 5], 3)
        [0, 1, 4]
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    count = len(costs)
    # best[k][i]: the largest sum if the first i costs are cut into k + 1 runs; cut[k][i]: the start of the last run
    best = [sums[:]]
    cut = [[0] * (count + 1)]
    for parts in range(1, n_parts):
        row, at = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(parts + 1, count + 1):
            for begin in range(parts, end):
                worst = max(best[parts - 1][begin], sums[end] - sums[begin])
                if worst < row[end]:
                    row[end], at[end] = worst, begin
        best.append(row)
        cut.append(at)
    starts, end = [], count
    for parts in range(n_parts - 1, -1, -1):
        end = cut[parts][end] if parts else 0
        starts.append(end)
    return starts[::-1]


def _runs(layers: Layers) -> list[int]:
    """Return the positions of layers with parameters. Layers before the first one belong to its run."""
    found = [position for position, (_, layer) in enumerate(layers) if _numel(layer)]
    return [0, *found[1:]] if found else []


def _spans(starts: Sequence[int], count: int) -> list[tuple[int, int]]:
    return list(zip(starts, [*starts[1:], count], strict=True))


def _starts(positions: Sequence[int], n_stages: int, count: int) -> list[int]:
    starts = [0, *positions]
    if len(starts) != n_stages or any(a >= b for a, b in zip(starts, [*starts[1:], count], strict=True)):
        raise ValueError(
            f"split_model got positions {list(positions)} for {n_stages} stages of {count} layers; "
            f"give {n_stages - 1} rising positions between 1 and {count - 1}"
        )
    return starts


def _numel(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def _leaves(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return packed_as(value, [_leaves(one) for one in value])
    value = value.detach()
    # A clone, because a layer that works in place must not write a leaf.
    return value.requires_grad_().clone() if value.is_floating_point() else value


def _now(value: Any) -> float:
    first = value[0] if isinstance(value, tuple | list) else value
    if first.is_cuda:
        torch.cuda.synchronize(first.device)
    return time.perf_counter()
