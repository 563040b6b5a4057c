"""The causes of replicas that differ, by what differs and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.evidence.exchanges import Exchange, why_apart
from pdlcheck.checks.message import first_and_more
from pdlcheck.checks.state import State

__all__ = ["Differing", "diagnose"]

_BUFFERS = "only buffers differ: they were not broadcast, or were changed on some rank after the broadcast"
_OWN_BUFFERS = "only buffers differ: each rank updates them from its own data, and nothing synchronises them after that"
_INITIAL = "initial weights were not broadcast, or were changed on some rank after the broadcast"
_GRADIENTS = "gradients differ: they were not synchronised on all ranks, or not all of them, or changed afterwards"
_NOT_AVERAGED = "models were not averaged on all ranks, or not at this step"
_NO_GRADIENTS_LEFT = (
    "no gradients are left to look at: they were not synchronised, or what uses them differs between ranks; "
    "zero_grad() before the backward pass, not after the step, lets this check tell"
)
_NO_GRADIENT = "no gradient reaches them: what else changes them, such as an average of weights, differs between ranks"
_OPTIMIZERS = (
    "gradients agree: optimizer states or learning rates differ, or on some rank the step was not taken, or weights "
    "were changed"
)
_STALE = (
    "the rank took no step, or loaded a file, or a copy, before the new one was written: a barrier, or a broadcast of "
    "what was loaded, must come between"
)
_ONLY_GRADIENTS = (
    "; parameters are alike: right for a step that reduces gradients into memory of its own, as ZeRO does, or averages "
    "models, which gradients=False accepts"
)
_ACCUMULATED = ", or that accumulates them for a later one, which sync_every= accepts"
_WHOLE = (
    "give as model what each rank holds whole, such as a plain copy that start and step fill within "
    "summon_full_params(); what fully_shard divides is compared whole"
)
_FLAT = f"these are shards, not replicas: each rank holds a part of a flat tensor, as under FSDP1; {_WHOLE}"
_SHAPES = f"shapes differ: ranks made other models, or these are shards, not replicas; then {_WHOLE}"


class Differing(NamedTuple):
    """The evidence of replicas that differ.

    Args:
        where: how often the check had looked before; 0 is before the first step.
        names: the tensors that differ.
        gradients: whether the check looks at gradients.
        values: the state of each rank.
        exchanges: what each rank exchanged before that look, and before the one before; empty if unknown.
        lacking: the parameters without a gradient that had one at the look before, with their numbers of elements.
        earlier: the ranks that hold the parameters of an earlier look, each with the number of that look.
        sync_every: the number of steps between two looks.
        unwrapped: the parameters that DistributedDataParallel does not reduce, although its module has them.
    """

    where: int
    names: list[str]
    gradients: bool
    values: list[State]
    exchanges: Sequence[Sequence[Exchange]]
    lacking: Mapping[str, int]
    earlier: Mapping[int, int]
    sync_every: int
    unwrapped: Sequence[str] = ()

    @property
    def kinds(self) -> set[str]:
        """Return which of parameters, gradients and buffers differ."""
        return {name.split()[0] for name in self.names}

    @property
    def parameters(self) -> set[str]:
        """Return the parameters that differ, or whose gradients do."""
        return {name.replace("gradient of", "parameter", 1) for name in self.names}

    @property
    def why_apart(self) -> str | None:
        """Return why gradients differ if what the ranks exchanged shows it."""
        if "gradient" not in self.kinds or not all(self.exchanges):
            return None
        before = [one[1] for one in self.exchanges if len(one) > 1]
        step, earlier = (self.steps_before(where) for where in (self.where, self.where - 1))
        return why_apart(step, [one[0] for one in self.exchanges], earlier, before, self.lacking)

    @property
    def stale(self) -> str | None:
        """Return which ranks hold the parameters of an earlier step, if others hold new ones; gradients agree."""
        if "parameter" not in self.kinds or "gradient" in self.kinds or not 0 < len(self.earlier) < len(self.values):
            return None
        rank, look = next(iter(self.earlier.items()))
        step, more = (
            look * self.sync_every,
            f", and so do {len(self.earlier) - 1} more" if len(self.earlier) > 1 else "",
        )
        of = f"that it had after step {step}" if step else "of the start"
        return f"rank {rank} holds the parameters {of}{more}"

    def steps_before(self, where: int) -> str:
        """Return the steps between a look and the one before, in words."""
        last = where * self.sync_every
        return f"step {last}" if self.sync_every == 1 else f"steps {last - self.sync_every + 1} to {last}"

    @property
    def lack_gradients(self) -> bool:
        """Return whether no gradient is left to look at."""
        return all(grad is None for name, grad in self.values[0].items() if name.startswith("gradient"))

    @property
    def get_no_gradient(self) -> bool:
        """Return whether the parameters that differ have no gradient."""
        return all(self.values[0].get(name.replace("parameter", "gradient of", 1)) is None for name in self.names)


def diagnose(differing: Differing) -> Diagnosis:
    """Return what made the replicas differ, by what differs and when."""
    factors = _factors(differing.values) if "gradient" in differing.kinds else []
    told = ", ".join(f"rank {rank}: {factor:.6g}" for rank, factor in enumerate(factors))
    alone = _ONLY_GRADIENTS if differing.kinds == {"gradient"} else ""
    alone += _ACCUMULATED if alone and differing.sync_every == 1 else ""
    scaled = (
        f"all gradients of a rank are one factor times those of rank 0 ({told}): scaled by a value of that rank after "
        f"they were synchronised, or not synchronised where losses differ by that factor{alone}"
    )
    return explain(
        differing,
        [
            Candidate(
                _BUFFERS,
                holds=lambda one: one.kinds == {"buffer"} and one.where == 0,
                short="buffers were not broadcast",
            ),
            Candidate(_FLAT, holds=lambda one: any("_flat_param" in name for name in one.names)),
        ],
        [Candidate(_SHAPES, holds=lambda one: _shapes_differ(one.names, one.values))],
        [Candidate(_INITIAL, holds=lambda one: one.where == 0 and one.kinds != {"buffer"})],
        [
            Candidate(
                "gradients differ: DistributedDataParallel does not reduce that of "
                f"{first_and_more(sorted(differing.parameters))}, which was assigned after the wrap, in place of the "
                "parameter that it knows",
                holds=lambda one: "gradient" in one.kinds and one.parameters <= set(one.unwrapped),
                short="parameters that are not wrapped",
            )
        ]
        if differing.unwrapped
        else [],
        [Candidate.when(f"gradients differ: {differing.why_apart}{alone}", differing.why_apart is not None)],
        [Candidate(scaled, holds=lambda _: bool(factors), short="gradients times a factor of each rank")],
        [Candidate(_GRADIENTS + alone, holds=lambda one: "gradient" in one.kinds)],
        [Candidate(_NOT_AVERAGED, holds=lambda one: not one.gradients and one.kinds != {"buffer"})],
        [Candidate(_NO_GRADIENTS_LEFT, holds=lambda one: one.lack_gradients and one.kinds != {"buffer"})],
        [Candidate(_NO_GRADIENT, holds=lambda one: one.get_no_gradient and one.kinds != {"buffer"})],
        [Candidate.when(f"{differing.stale}: {_STALE}", differing.stale is not None)],
        [Candidate(_OPTIMIZERS, holds=lambda one: one.kinds != {"buffer"})],
        [Candidate(_OWN_BUFFERS, holds=lambda one: one.kinds == {"buffer"} and one.where > 0, short="own buffers")],
    )


def _shapes_differ(names: list[str], values: list[State]) -> bool:
    held = [[state.get(name) for state in values] for name in names if name.startswith("parameter")]
    return any(len({tensor.shape for tensor in tensors if tensor is not None}) > 1 for tensors in held)


def _factors(values: list[State]) -> list[float]:
    """Return, for each rank, its gradients' factor relative to those of rank 0; empty if a rank has no such factor."""
    grads = [
        [grad for name, grad in state.items() if grad is not None and name.startswith("gradient")] for state in values
    ]
    everyone = [torch.cat([_real(grad).flatten() for grad in own] or [torch.zeros(0)]) for own in grads]
    first = everyone[0]
    if any(one.shape != first.shape for one in everyone) or first.count_nonzero() < 2:
        return []  # a single number is always a factor times another
    rounding = 4 * max(torch.finfo(grad.dtype).eps for grad in grads[0])
    factors = [float(one.dot(first) / first.dot(first)) for one in everyone]
    pairs = zip(everyone, factors, strict=True)
    return factors if all(f > 0 and torch.allclose(one, f * first, rtol=rounding, atol=0) for one, f in pairs) else []


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
