"""The stages of one rank, built from a model and a schedule. No communication: every rank finds the same errors."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.primitives.pipeline.cells import Schedule
from pdlcheck.primitives.pipeline.fingerprint import Fingerprint, kind_of, model_facts, settings_of, stage_facts
from pdlcheck.primitives.pipeline.schedules import SCHEDULES
from pdlcheck.primitives.pipeline.splitting import layer_names, split_model
from pdlcheck.primitives.pipeline.stage import Stage
from pdlcheck.primitives.pipeline.ties import Tie
from pdlcheck.primitives.pipeline.validator import require_valid_schedule

__all__ = ["Built", "Request", "build", "make_schedule"]


@dataclass(frozen=True)
class Request:
    """The arguments of a :class:`Pipeline <pdlcheck.primitives.pipeline.Pipeline>`, unchanged."""

    model: nn.Sequential
    loss: Callable[..., Tensor] | None
    schedule: str | Schedule
    n_microbatches: int | None
    stages_per_rank: int | None
    split: Literal["layers", "parameters", "time"] | Sequence[int]
    sample: Any
    reduction: Literal["mean", "sum"] | None
    recompute: bool
    optimizer: Callable[[list[Tensor]], Optimizer] | None
    vertical_sync: bool
    loss_weight: Callable[[Any], float] | None


@dataclass(frozen=True)
class Built:
    """The part of a pipeline in one process.

    Args:
        schedule: a valid schedule.
        names: the layers of every stage.
        stages: the stages of this process.
        module: their layers, under the names that they have in the model.
        ties: parameters that stages of several ranks share, if one of them is here.
        reduction: ``"mean"`` or ``"sum"``.
        fingerprint: the facts that the part was made from.
        unsaid: whether neither the loss nor an argument states that the loss is a mean.
        token: a text unique to this pipeline and those side by side, the same on all their ranks.
    """

    schedule: Schedule
    names: list[list[str]]
    stages: dict[int, Stage]
    module: nn.Module
    ties: list[Tie]
    reduction: str
    fingerprint: Fingerprint
    unsaid: bool = False
    token: str = ""


def make_schedule(request: Request, n_ranks: int) -> Schedule:
    """Return the requested schedule, made from its name or given as such, for ``n_ranks`` ranks."""
    chosen = request.schedule
    if isinstance(chosen, Schedule):
        if request.n_microbatches not in (None, chosen.n_microbatches):
            raise ValueError(
                f"Pipeline got n_microbatches={request.n_microbatches} and a schedule of {chosen.n_microbatches} "
                "micro-batches; leave n_microbatches out"
            )
        require_valid_schedule(chosen)
    elif chosen in SCHEDULES:
        if request.n_microbatches is None:
            raise ValueError(f"Pipeline needs n_microbatches with schedule={chosen!r}")
        more = {}
        if chosen == "interleaved":
            more = {"stages_per_rank": 2 if request.stages_per_rank is None else request.stages_per_rank}
        elif request.stages_per_rank not in (None, 1):
            raise ValueError(f"Pipeline takes stages_per_rank with schedule='interleaved' only, got {chosen!r}")
        chosen = SCHEDULES[chosen](n_ranks, request.n_microbatches, **more)
    else:
        raise ValueError(f"Pipeline knows schedule {', '.join(map(repr, SCHEDULES))} or a Schedule, got {chosen!r}")
    if chosen.n_ranks != n_ranks:
        raise ValueError(f"Pipeline got a schedule for {chosen.n_ranks} ranks, the pipeline has {n_ranks}")
    return chosen


def build(request: Request, n_ranks: int, place: int | None, devices: Sequence[torch.device | str | None]) -> Built:
    """Return the stages of one process.

    Args:
        request: the user's arguments.
        n_ranks: rows of the schedule.
        place: the row of this process; None is all of them.
        devices: for each row, the device of its stages; None leaves them on the model's device.
    """
    layers = layer_names(request.model)
    schedule = make_schedule(request, n_ranks)
    reduction, unsaid = _reduction(request)
    _require_optimizer(request, schedule)
    names = split_model(request.model, schedule.n_stages, by=request.split, sample=request.sample)
    found, parts = iter(layers), []
    for stage_names in names:
        parts.append([next(found)[1] for _ in stage_names])
    own = {stage for stage, rank in enumerate(schedule.stage_ranks) if place in (None, rank)}
    stages = {}
    module = nn.Module()
    moved: dict[int, torch.device] = {}
    for stage in sorted(own):
        asked = devices[schedule.stage_ranks[stage]]
        device = next(nn.ModuleList(parts[stage]).parameters()).device if asked is None else torch.device(asked)
        if any(moved.get(id(p), device) != device for layer in parts[stage] for p in layer.parameters()):
            parts[stage] = list(copy.deepcopy(nn.ModuleList(parts[stage])))  # a tied parameter cannot be on two devices
        sequence = nn.Sequential(OrderedDict(zip(names[stage], parts[stage], strict=True))).to(device)
        moved |= {id(parameter): device for parameter in sequence.parameters()}
        loss = request.loss if stage == schedule.n_stages - 1 else None
        stages[stage] = Stage(stage, sequence, device, loss, request.recompute)
        for name, layer in zip(names[stage], parts[stage], strict=True):
            module.add_module(name, layer)
    ties = _ties(request.model, names, schedule, module, place)
    if ties and schedule.asynchronous:
        raise ValueError(
            f"Pipeline cannot keep {ties[0].name!r} tied under {schedule.name}: its stages take steps of their own; "
            "untie it or take schedule='1f1b'"
        )
    fingerprint = _fingerprint(request, schedule, names, reduction, module)
    here = [tie for tie in ties if tie.copies]
    return Built(schedule, names, stages, module, here, reduction, fingerprint, unsaid)


def _fingerprint(
    request: Request, schedule: Schedule, names: list[list[str]], reduction: str, module: nn.Module
) -> Fingerprint:
    whole = {
        "schedule": schedule.name,
        "n_microbatches": str(schedule.n_microbatches),
        "number of stages": str(schedule.n_stages),
        "grid": str(schedule),
        "layers of the stages": " | ".join(", ".join(stage_names) for stage_names in names),
        "loss": kind_of(request.loss),
        "reduction": reduction,
        "loss_weight": "not given" if request.loss_weight is None else "given",
        "recompute": str(bool(request.recompute)),
        "optimizer": kind_of(request.optimizer),
        "vertical_sync": str(bool(request.vertical_sync)),
        **model_facts(request.model),
    }
    stages = {"arguments of optimizer": settings_of(request.optimizer), **stage_facts(module)}
    return Fingerprint(whole, stages)


def _reduction(request: Request) -> tuple[str, bool]:
    """Return ``"mean"`` or ``"sum"``, and whether no argument states it; ``loss_weight`` would imply a mean."""
    loss, reduction = request.loss, request.reduction
    if loss is not None and not callable(loss):
        raise TypeError(f"Pipeline takes loss as a function of outputs and targets, got {type(loss).__name__}")
    own = getattr(loss, "reduction", None)
    if isinstance(loss, functools.partial):
        own = loss.keywords.get("reduction", getattr(loss.func, "reduction", None))
    chosen = reduction or own or "mean"
    if chosen not in ("mean", "sum"):
        raise ValueError(f"Pipeline knows reduction 'mean' and 'sum', got {chosen!r}: a loss must be one number")
    if own in ("mean", "sum") and chosen != own:
        raise ValueError(f"Pipeline got reduction={chosen!r} for a loss that has reduction={own!r}; leave it out")
    return str(chosen), not (reduction or own or request.loss_weight)


def _require_optimizer(request: Request, schedule: Schedule) -> None:
    if schedule.asynchronous and not callable(request.optimizer):
        raise ValueError(
            f"Pipeline needs optimizer with {schedule.name}, which takes a step after every backward pass; "
            "pass one such as functools.partial(torch.optim.SGD, lr=0.1)"
        )
    if not schedule.asynchronous and (request.optimizer is not None or request.vertical_sync):
        raise ValueError(
            f"Pipeline takes optimizer and vertical_sync with schedule='pipedream' only, got {schedule.name!r}; "
            "make the optimizer from pipeline.module.parameters() and call it after step"
        )


def _ties(
    model: nn.Module, names: list[list[str]], schedule: Schedule, module: nn.Module, place: int | None
) -> list[Tie]:
    """Return the parameters that several ranks have, with the copies in this process by the row of their stage."""
    stage_of = {name: stage for stage, stage_names in enumerate(names) for name in stage_names}
    groups: dict[int, dict[int, str]] = {}
    # named_parameters lists a layer that occurs twice in the model only once, so walk through the layers.
    for layer_name, layer in layer_names(model):
        for name, parameter in layer.named_parameters():
            rank = schedule.stage_ranks[stage_of[layer_name]]
            groups.setdefault(id(parameter), {}).setdefault(rank, f"{layer_name}.{name}")
    ties = []
    for by_rank in groups.values():
        if len(by_rank) < 2:
            continue
        copies = {rank: module.get_parameter(name) for rank, name in by_rank.items() if place in (None, rank)}
        if place is None and len({id(copy) for copy in copies.values()}) == 1:
            continue  # one tensor on one device, so autograd adds its gradients
        ties.append(Tie(min(by_rank.items())[1], copies, tuple(sorted(by_rank))))
    return ties
