"""The ranks that hold copies of one tensor, and the factors that make the sum over them zero if all are equal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from pdlcheck.watching.digests import signed, weight_of

__all__ = ["ReplicaSets", "factors"]

Ranks = tuple[int, ...]


class ReplicaSets:
    """The ranks that hold copies of the tensors of this rank.

    Args:
        ranks: the global ranks of the group that is compared.
        rank: the global rank of this process.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.whole: Ranks = tuple(sorted(ranks))
        self.rank = rank
        self._of_meshes: dict[Any, Ranks] = {}

    def of(self, tensor: Tensor) -> Ranks:
        """Return the global ranks that hold the same elements of ``tensor``, as far as the group has them.

        These are all ranks, for a plain tensor. For a DTensor, they are the ranks along the dimensions of its mesh
        over which it is replicated; a shard or a partial sum has no copies there.
        """
        placements: Any = getattr(tensor, "placements", None)
        if placements is None:
            return self.whole
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]  # a DTensor
        key = mesh, tuple(placements)
        if key not in self._of_meshes:
            at = mesh.get_coordinate()
            index = tuple(
                slice(None) if placement.is_replicate() else coordinate
                for placement, coordinate in zip(placements, at, strict=True)
            )
            holders = mesh.mesh[index].flatten().tolist()
            self._of_meshes[key] = tuple(sorted(set(holders) & set(self.whole)))
        return self._of_meshes[key]

    def factor(self, ranks: Ranks) -> int:
        """Return the factor of this rank among the ranks of a replica set."""
        return factors(len(ranks))[ranks.index(self.rank)]


@lru_cache(maxsize=100)
def factors(count: int) -> Ranks:
    """Return pseudo-random factors, one for each of ``count`` ranks, whose sum is zero modulo 2**64.

    So the sum of factor times digest over the ranks is zero if all digests are equal, and hardly ever otherwise.

    Example:
        >>> sum(factors(3)) % 2**64, len(set(factors(3)))
        (0, 3)
    """
    others = [weight_of(f"rank {place}") for place in range(1, count)]
    return tuple(signed(one) for one in (-sum(others), *others))
