"""Logical tensors, put together from the pieces of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pdlcheck.tracing.errors import TraceError
from pdlcheck.tracing.files import RankTrace, Trace
from pdlcheck.tracing.layout import BATCH_AXES, MICRO_BATCH, SAMPLES, Split
from pdlcheck.tracing.records import Key, Record

__all__ = ["Index", "Logical", "Member", "Piece", "absent_gradients", "logical_tensors"]


@dataclass(frozen=True, eq=False)
class Member:
    """One tensor of one rank."""

    trace: RankTrace
    record: Record

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of what the rank has."""
        return tuple(self.trace.file.get_slice(self.record.key).get_shape())

    @cached_property
    def splits(self) -> list[Split]:
        """The splits, with those of samples as shards, or as terms if the tensor has no dimension for them."""
        found = []
        for split in self.record.splits:
            dim = split.dim
            if split.how != "batch":
                found.append(split)
            elif not self.shape:
                found.append(replace(split, how="sum" if self.record.kind == "backward" else "mean", dim=None))
            elif dim is not None and -len(self.shape) <= dim < len(self.shape):
                if split.positions is None or self.shape[dim] % max(len(split.positions), 1) == 0:
                    found.append(replace(split, how="shard", dim=dim % len(self.shape)))
                elif self.record.kind == "backward":  # the same for all samples, as a table is; its gradient is a sum
                    found.append(replace(split, how="sum", dim=None, positions=None))
        return found

    @cached_property
    def along(self) -> list[list[Split]]:
        """The splits of each dimension."""
        return [[split for split in self.splits if split.dim == dim] for dim in range(len(self.shape))]


Index = tuple[range | tuple[int, ...], ...]  # the positions along each dimension


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a logical tensor: that of one rank, or the sum or mean of the terms of several.

    Args:
        members: the tensors that make it.
        index: the positions along each dimension.
        how: ``sum`` or ``mean`` for several members.
    """

    members: list[Member]
    index: Index
    how: str = "sum"

    @cached_property
    def value(self) -> Tensor:
        """The values."""
        found = [one.trace.tensor(one.record) for one in self.members]
        if len(found) == 1:
            return found[0]
        total = torch.stack([_wide(one) for one in found]).sum(0)
        return total / len(found) if self.how == "mean" else total

    @property
    def ranks(self) -> list[int]:
        """The ranks that have it."""
        return sorted({one.trace.rank for one in self.members})

    def of(self, whole: Tensor) -> Tensor:
        """Return the same part of a tensor of the logical shape."""
        for dim, part in enumerate(self.index):
            if isinstance(part, tuple):
                whole = whole.index_select(dim, torch.tensor(part, dtype=torch.long))
            elif len(part) != whole.shape[dim]:
                whole = whole.narrow(dim, part.start, len(part))
        return whole


@dataclass(frozen=True)
class Logical:
    """A tensor of the whole model for all samples of a step.

    Args:
        key: its kind, name, call and index.
        members: the tensors of all ranks that belong to it.
    """

    key: Key
    members: list[Member]

    @property
    def order(self) -> int:
        """The position in the step at which it is first there."""
        return min(one.record.order for one in self.members)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return tuple(sum(sizes.values()) or 0 for sizes in self._sizes)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The pieces, in the order of the ranks."""
        groups: dict[object, list[Member]] = {}
        for one in self.members:
            summed = {axis for split in one.splits if split.dim is None for axis in _axes(split)}
            where = tuple((axis, at) for axis, at in one.record.coordinates.items() if axis not in summed)
            alone = one.trace.rank if not summed else None
            groups.setdefault((where, one.record.mesh, alone, one.record.micro_batch * (not summed)), []).append(one)
        found = []
        for members in groups.values():
            terms = [split for split in members[0].splits if split.dim is None]
            how = "mean" if any(split.how == "mean" for split in terms) else "sum"
            if terms and len(members) < (needed := math.prod(max(split.of, 1) for split in terms)):
                raise TraceError(
                    f"{_told(self.key)}: {len(members)} of {needed} terms of a sum are there; "
                    "the mapping of the parallel run splits it over ranks that did not record it"
                )
            found.append(Piece(members, self._index(members[0]), how))
        return found

    @cached_property
    def value(self) -> Tensor:
        """The whole tensor."""
        pieces = self.pieces
        if len(pieces) == 1 or pieces[0].value.shape == self.shape:
            return pieces[0].value
        whole = torch.zeros(self.shape, dtype=pieces[0].value.dtype)
        for piece in pieces:
            dims = len(piece.index)
            across = [torch.tensor(part).view(-1, *[1] * (dims - dim - 1)) for dim, part in enumerate(piece.index)]
            whole[tuple(across)] = piece.value.to(whole.dtype)
        return whole

    def repeated(self) -> Logical:
        """Return the tensor that has the same value for all samples: a table, not an output for each sample.

        Its gradient is a sum over the samples.
        """
        of_sum = self.key[0] == "backward"
        members = []
        for one in self.members:
            splits = [
                replace(split, how="sum", dim=None) if split.how == "batch" else split
                for split in one.record.splits
                if of_sum or split.how != "batch"
            ]
            members.append(Member(one.trace, replace(one.record, splits=tuple(splits))))
        return Logical(self.key, members)

    @cached_property
    def _sizes(self) -> list[dict[tuple[int, ...], int]]:
        """For each dimension, the sizes of the parts by their coordinates."""
        dims = len(self.members[0].shape)
        sizes: list[dict[tuple[int, ...], int]] = [{} for _ in range(dims)]
        for one in self.members:
            if len(one.shape) != dims:
                raise TraceError(f"{_told(self.key)}: ranks have tensors of {dims} and of {len(one.shape)} dimensions")
            for dim in range(dims):
                at, size = self._at(one, dim), one.shape[dim]
                self._require_positions(one, dim)
                if sizes[dim].setdefault(at, size) != size:
                    raise TraceError(
                        f"{_told(self.key)}: rank {one.trace.rank} has {size} elements along dimension {dim}, another "
                        f"rank {sizes[dim][at]} of the same part; give the mapping the axis that splits the dimension"
                    )
        for one in self.members[:1]:
            for dim in range(dims):
                self._require_all_parts(one, dim, sizes[dim])
        return sizes

    def _require_positions(self, one: Member, dim: int) -> None:
        positions = one.along[dim][0].positions if one.along[dim] else None
        if positions is not None and (not positions or one.shape[dim] % len(positions)):
            raise TraceError(
                f"{_told(self.key)}: the mapping gives rank {one.trace.rank} {len(positions)} positions for "
                f"{one.shape[dim]} elements along dimension {dim}; samples= and Positions must match what a rank has"
            )

    def _require_all_parts(self, one: Member, dim: int, sizes: Iterable[tuple[int, ...]]) -> None:
        splits = one.along[dim]
        if splits and splits[0].positions is not None:
            return
        for i, split in enumerate(splits):
            missing = set(range(split.of)) - {at[i] for at in sizes}
            if missing and split.axis != MICRO_BATCH:
                raise TraceError(
                    f"{_told(self.key)}: no rank has part {min(missing)} of {split.of} along {split.axis}; "
                    "the mapping misses it: check ranks= and rename="
                )

    def _at(self, one: Member, dim: int) -> tuple[int, ...]:
        splits = one.along[dim]
        if splits and splits[0].positions is not None:
            return splits[0].positions
        return tuple(split.at for split in splits)

    def _index(self, one: Member) -> Index:
        found: list[range | tuple[int, ...]] = []
        for dim, size in enumerate(one.shape):
            splits = one.along[dim]
            last = -1
            if splits and splits[0].positions is not None:
                positions = splits[0].positions
                times = size // max(len(positions), 1)
                found.append(tuple(at * times + i for at in positions for i in range(times)))
                last = max(found[-1])
            else:
                at, sizes = self._at(one, dim), self._sizes[dim]
                start = sum(sizes[other] for other in sizes if other < at)
                found.append(range(start, start + size))
            if last >= self.shape[dim]:
                raise TraceError(
                    f"{_told(self.key)}: position {last} of rank {one.trace.rank} along dimension {dim} is beyond the "
                    f"{self.shape[dim]} elements of all ranks; positions start at 0, and the ranks together have all"
                )
        return tuple(found)


def logical_tensors(trace: Trace, step: int) -> dict[Key, Logical]:
    """Return the logical tensors of a step, in the order in which the step has them."""
    members: dict[Key, list[Member]] = {}
    for rank in trace.ranks:
        for record in rank.records:
            if record.step == step and record.key is not None:
                members.setdefault(record.logical, []).append(Member(rank, record))
    found = [Logical(key, ones) for key, ones in members.items()]
    return {one.key: one for one in sorted(found, key=lambda one: one.order)}


def absent_gradients(trace: Trace, step: int) -> dict[Key, list[int]]:
    """Return the ranks that had no gradient of a parameter when its optimizer made the step."""
    found: dict[Key, list[int]] = {}
    for rank in trace.ranks:
        for record in rank.records:
            if record.step == step and record.key is None:
                found.setdefault(record.logical, []).append(rank.rank)
    return found


def _axes(split: Split) -> tuple[str, ...]:
    return (*BATCH_AXES, MICRO_BATCH) if split.axis == SAMPLES else (split.axis,)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _told(key: Key) -> str:
    kind, name, _, _ = key
    words = {"forward": "the output of ", "backward": "the gradient of the output of ", "gradient": "the gradient of "}
    return f"{words.get(kind, '')}{name}"
