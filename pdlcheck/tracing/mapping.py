"""The mapping from the tensors of a rank to logical tensors: those of the whole model, for all samples of a step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from pdlcheck.tracing.layout import BATCH_AXES, MICRO_BATCH, SAMPLES, Split
from pdlcheck.tracing.records import Record

__all__ = ["Mapping", "Placed", "Positions", "Rule", "coordinates_of", "finished", "local_part", "mapping_of", "place"]

_NO_TENSOR_AXES = (*BATCH_AXES, "pp")


@dataclass(frozen=True)
class Positions:
    """The positions of this rank's elements along a dimension, where a shard is not one block.

    Args:
        dim: the dimension.
        positions: the positions, such as those of both chunks of a rank in zigzag context parallelism.
    """

    dim: int
    positions: Sequence[int]


Rule = Placement | Positions | dict[str, Placement | Positions] | None


@dataclass(frozen=True)
class Mapping:
    """The parts of the logical tensors that this rank has.

    DTensors need no rule: their placements say it. Other tensors are whole unless a rule names them, and outputs of
    modules are of this rank's samples.

    Args:
        rules: patterns of names of modules (their outputs) and of parameters, and the placement of each. ``*`` stands
            for one part of a name, ``**`` for several. The placement is one of ``torch.distributed.tensor``, or
            ``Positions``, for the axis ``tp`` or the only axis; or a dict from axis to placement. None leaves the
            tensor out. The first pattern that matches counts. ``input`` is the input of the model.
        outputs: the placement of outputs and of inputs that no rule names, such as ``{"cp": Shard(1)}`` where each rank
            has some positions of a sequence. It leaves out outputs that lack the dimension.
        ranks: the axes of ranks and this rank's coordinate, as a dict such as ``{"dp": (0, 2), "tp": (1, 2)}``, or a
            ``DeviceMesh`` with names of its dimensions. Axes named dp, fsdp, data or the like divide the samples. By
            default all ranks divide the samples; with rules, all ranks are the axis ``tp``.
        rename: returns the name in the whole model for the name of a module or parameter of this rank; None leaves it
            out. It is for stages of a pipeline, and for experts.
        samples: returns the positions in the whole batch of the samples of this rank, for a step and a micro-batch,
            both from 0. By default the batch is divided by rank, then by micro-batch, each in one block.
        batch_dim: the dimension of the samples in outputs.
        mean_over: the axes over which gradients are averaged after the backward pass, so that gradients of outputs are
            larger by the number of their ranks. ``micro-batch`` counts as one. Default: those that divide the samples,
            and ``cp``.
    """

    rules: dict[str, Rule] = field(default_factory=dict)
    _: KW_ONLY
    outputs: Rule = field(default_factory=dict)
    ranks: DeviceMesh | dict[str, tuple[int, int]] | None = None
    rename: Callable[[str], str | None] | None = None
    samples: Callable[[int, int], Sequence[int]] | None = None
    batch_dim: int = 0
    mean_over: Sequence[str] | None = None


@dataclass(frozen=True)
class Placed:
    """A tensor of a rank and its splits; ``divide`` is the number by which a gradient of an output is too large."""

    local: Tensor
    splits: tuple[Split, ...]
    mesh: str = ""
    coordinates: dict[str, int] = field(default_factory=dict)
    divide: int = 1


def mapping_of(given: Mapping | dict[str, Rule] | None) -> Mapping:
    """Return the mapping of the argument ``mapping``.

    Raises:
        TypeError: it is neither a mapping nor rules.
        ValueError: an axis has a coordinate that it cannot have, or a rule names an axis that there is not.
    """
    mapping = given if isinstance(given, Mapping) else Mapping(rules={} if given is None else given)
    if not isinstance(mapping.rules, dict):
        raise TypeError(f"mapping must be a Mapping or a dict from patterns to placements, got {given!r}")
    axes = coordinates_of(mapping)
    for axis, (at, of) in axes.items():
        if not 0 <= at < of:
            raise ValueError(f"the mapping puts this rank at {at} of {of} on the axis {axis}; coordinates start at 0")
    for pattern, rule in (mapping.rules | {"outputs": mapping.outputs}).items():
        _by_axis(pattern, rule, axes)
    return mapping


def coordinates_of(mapping: Mapping) -> dict[str, tuple[int, int]]:
    """Return the coordinate of this rank on each axis, and the number of ranks there."""
    if isinstance(mapping.ranks, DeviceMesh):
        names, at = mapping.ranks.mesh_dim_names, mapping.ranks.get_coordinate()
        if names is None or at is None:
            raise ValueError("ranks= needs a mesh that has this rank, and mesh_dim_names")
        return {name: (at[i], mapping.ranks.size(i)) for i, name in enumerate(names)}
    if mapping.ranks is not None:
        return dict(mapping.ranks)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {"tp" if mapping.rules else "dp": (rank, size)}


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place(
    mapping: Mapping,
    axes: dict[str, tuple[int, int]],
    name: str,
    tensor: Tensor,
    *,
    is_output: bool,
    is_gradient: bool,
    step: int = 0,
    micro_batch: int = 0,
) -> Placed | None:
    """Return the place of a tensor among those of all ranks; None if the mapping leaves it out.

    Args:
        mapping: the mapping.
        axes: the result of ``coordinates_of``.
        name: the logical name of the module or parameter.
        tensor: what this rank has.
        is_output: it belongs to the samples of this rank: an output, its gradient or an input.
        is_gradient: it is a gradient of an output.
        step: the step, from 0.
        micro_batch: the micro-batch, from 0.
    """
    local = local_part(tensor)
    rule = _rule(mapping, name, local.dim() if is_output else None)
    if rule is None:
        return None
    splits: list[Split] = []
    batch = [axis for axis in axes if axis in BATCH_AXES]
    coordinates = {axis: at for axis, (at, _) in axes.items()}
    mesh, own = "", set()
    if isinstance(tensor, DTensor):
        splits += _splits_of(tensor)
        names = _names(tensor.device_mesh)
        at: Sequence[int] = tensor.device_mesh.get_coordinate() or []
        own = set(names)
        coordinates = {axis: coordinates[axis] for axis in batch if axis not in own} | dict(zip(names, at, strict=True))
        mesh = str(tensor.device_mesh.mesh.flatten().tolist())
    for axis, placement in _by_axis(name, rule, axes).items():
        if axis not in own:
            splits += _split(placement, axis, *axes[axis], local.dim(), is_gradient)
    if is_output:
        splits += _batch_splits(mapping, {axis: axes[axis] for axis in batch if axis not in own}, step, micro_batch)
    divide = 1
    if is_gradient:
        over = mapping.mean_over if mapping.mean_over is not None else [*batch, "cp"]
        divide = math.prod(of for axis, (_, of) in axes.items() if axis in over)
    return Placed(local, tuple(splits), mesh, coordinates, divide)


def finished(mapping: Mapping, record: Record, micro_batches: int) -> Record:
    """Return a record of an output, its gradient or an input, now that the number of micro-batches is known."""
    splits = tuple(
        replace(split, of=micro_batches) if split.axis == MICRO_BATCH else split
        for split in record.splits
        if split.axis != MICRO_BATCH or micro_batches > 1
    )
    averaged = record.kind == "backward" and mapping.mean_over is not None and MICRO_BATCH in mapping.mean_over
    return replace(record, splits=splits, divide=record.divide * (micro_batches if averaged else 1))


def _batch_splits(mapping: Mapping, batch: dict[str, tuple[int, int]], step: int, micro_batch: int) -> list[Split]:
    if mapping.samples is None:
        axes = batch | {MICRO_BATCH: (micro_batch, 0)}
        return [Split(axis, at, of, "batch", mapping.batch_dim) for axis, (at, of) in axes.items() if of != 1]
    positions = tuple(int(one) for one in mapping.samples(step, micro_batch))
    return [Split(SAMPLES, 0, 1, "batch", mapping.batch_dim, positions)]


def _rule(mapping: Mapping, name: str, dims: int | None) -> Rule:
    """Return the rule of a name; ``dims`` is the number of dimensions of an output."""
    for pattern, rule in mapping.rules.items():
        if _pattern(pattern).fullmatch(name):
            return rule
    if dims is None or mapping.outputs is None:
        return {} if dims is None else None
    placements = mapping.outputs.values() if isinstance(mapping.outputs, dict) else [mapping.outputs]
    lacks = any(getattr(one, "dim", 0) >= dims for one in placements if not isinstance(one, Partial | Replicate))
    return {} if lacks else mapping.outputs


@cache
def _pattern(text: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*\.|\*\*|\*)", text)
    words = {"**.": r"(?:.+\.)?", "**": r".*", "*": r"[^.]+"}
    return re.compile("".join(words.get(part) or re.escape(part) for part in parts))


def _by_axis(pattern: str, rule: Rule, axes: dict[str, tuple[int, int]]) -> dict[str, Placement | Positions]:
    """Return the placement on each axis that a rule gives."""
    if rule is None:
        return {}
    if not isinstance(rule, dict):
        candidates = [axis for axis in axes if axis not in _NO_TENSOR_AXES]
        axis = "tp" if "tp" in candidates else candidates[0] if len(candidates) == 1 else None
        if axis is None:
            raise ValueError(
                f"the mapping gives {pattern!r} a placement, and no axis for it among {', '.join(axes)}; "
                f"write {{'tp': {rule}}} and name the axis in ranks="
            )
        rule = {axis: rule}
    for axis, placement in rule.items():
        if axis not in axes:
            raise ValueError(f"the mapping splits {pattern!r} over {axis!r}; ranks= has only {', '.join(axes)}")
        if not isinstance(placement, Placement | Positions):
            raise TypeError(f"the mapping gives {pattern!r} {placement!r}; use Shard, Replicate, Partial or Positions")
    return rule


def _split(placement: Placement | Positions, axis: str, at: int, of: int, dims: int, is_gradient: bool) -> list[Split]:
    if isinstance(placement, Positions):
        return [Split(axis, at, of, "shard", placement.dim % max(dims, 1), tuple(map(int, placement.positions)))]
    if isinstance(placement, Shard):
        return [Split(axis, at, of, "shard", placement.dim % max(dims, 1))]
    if isinstance(placement, Partial) and placement.reduce_op == "avg":
        return [Split(axis, at, of, "sum" if is_gradient else "mean")]  # a gradient is divided by `divide` before
    if isinstance(placement, Partial) and not is_gradient:  # the gradient of each term is that of the sum
        return [Split(axis, at, of, "sum")]
    return []


def _splits_of(tensor: DTensor) -> list[Split]:
    """Return the splits of a DTensor; the axis that divides a dimension first comes first."""
    mesh = tensor.device_mesh
    found: list[tuple[bool, Split]] = []
    for i, (axis, at) in enumerate(zip(_names(mesh), mesh.get_coordinate() or [], strict=True)):
        placement = tensor.placements[i]
        strided = hasattr(placement, "split_factor")  # FSDP over shards of tensor parallelism: it divides them last
        if strided or isinstance(placement, Shard):
            dim = placement.dim % max(tensor.dim(), 1)  # type: ignore[attr-defined]  # both kinds have it
            found.append((strided, Split(axis, at, mesh.size(i), "shard", dim)))
        elif isinstance(placement, Partial):
            found.append((False, Split(axis, at, mesh.size(i), "mean" if placement.reduce_op == "avg" else "sum")))
        elif not isinstance(placement, Replicate):
            raise ValueError(f"trace does not know the placement {placement} of a DTensor")
    return [split for _, split in sorted(found, key=lambda one: one[0])]


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"mesh dimension {i}" for i in range(mesh.ndim))
