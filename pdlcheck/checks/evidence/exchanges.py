"""The values that ranks exchanged in a training step: evidence for the cause of gradients that differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

from pdlcheck.checks.message import first_and_more
from pdlcheck.operations.posted import record_posted
from pdlcheck.operations.signature import Signature

__all__ = ["Exchange", "exchange_of", "record_exchanges", "why_apart"]

_FROM_ONE = frozenset({"broadcast", "scatter"})  # these carry the values of one rank
_COUNTS = frozenset({"bool", "int32", "int64"})  # of sizes, flags and indices
_UNCALLED = (
    "nothing synchronises gradients, or the hooks of a wrapper do not run, as with no_sync() at the forward pass, "
    "after the wrapped model was cast or changed, or if the forward pass is that of the plain model"
)


class Exchange(NamedTuple):
    """The values that one rank exchanged with others in one step.

    Args:
        calls: how many of each operation that combines or collects the values of several ranks.
        elements: the number of elements in them.
        partners: the ranks of their groups, and of those of broadcasts, this rank included.
    """

    calls: Mapping[str, int]
    elements: int
    partners: frozenset[int]


@contextmanager
def record_exchanges() -> Iterator[list[Signature] | None]:
    """Record the operations of this rank during the block; None if pdlcheck does not watch its process groups."""
    if not hasattr(dist.group.WORLD, "post_collective"):
        yield None
        return
    with record_posted(dist.get_rank()) as posted:
        yield posted


def exchange_of(posted: Sequence[Signature]) -> Exchange:
    """Return what a rank exchanged by these operations, without counts, flags and barriers."""
    values = [one for one in posted if one.dtypes and not _COUNTS.issuperset(one.dtypes)]
    combined = [one for one in values if one.op not in _FROM_ONE]
    ranks = [{one.rank, one.peer} - {-1} if one.is_p2p else one.members for one in values]
    elements = sum(math.prod(shape) for one in combined for shape in one.shapes)
    return Exchange(Counter(one.op for one in combined), elements, frozenset().union(*ranks))


def why_apart(
    step: str, ranks: Sequence[Exchange], earlier: str, before: Sequence[Exchange], lacking: Mapping[str, int]
) -> str | None:
    """Return why gradients of ranks differ after a step if what they exchanged shows it.

    Args:
        step: the step in words, ``step 3``.
        ranks: what each rank exchanged in the step.
        earlier: the step before in words.
        before: what each rank exchanged in the step before; empty if there was none.
        lacking: the parameters that have no gradient in this step, and had one in the step before.
    """
    most, once = (max((one.elements for one in each), default=0) for each in (ranks, before))
    none = f"no rank reduced or gathered values in {step}"
    if lacking and once - most > sum(lacking.values()):
        less = f"the ranks reduced or gathered {most} elements in {step}" if most else none
        return (
            f"{less}, and {once} elements in {earlier}; {first_and_more([*lacking])} got no gradient in {step}: DDP "
            "waits for that of each parameter before it reduces a bucket, unless find_unused_parameters=True"
        )
    if most == 0 and once:
        return f"{none}, and {once} elements in {earlier}: no_sync(), or a condition, leaves it out"
    if most == 0:
        return f"{none}: {_UNCALLED}"
    groups = _connected(ranks)
    if len(groups) < 2:
        return None
    within = "groups of one rank each" if len(groups) == len(ranks) else " and ".join(map(str, groups))
    return (
        f"in {step} values went only within {within} ({_counted(ranks)}): gradients are reduced in a process group, or "
        "along a dimension of a mesh, that does not have all replicas"
    )


def _counted(ranks: Sequence[Exchange]) -> str:
    """Return the number of operations of the rank that made the most."""
    calls = max((one.calls for one in ranks), key=lambda calls: sum(calls.values()))
    return ", ".join(f"{count} {op}" for op, count in calls.items())


def _connected(ranks: Sequence[Exchange]) -> list[list[int]]:
    """Return the sets of ranks between which values can have gone, directly or by way of others."""
    groups: list[set[int]] = [{rank} for rank in range(len(ranks))]
    for rank, one in enumerate(ranks):
        mine = {rank, *one.partners}
        joined = [group for group in groups if group & mine]
        groups = [*(group for group in groups if not group & mine), set().union(*joined)]
    return sorted(sorted(group) for group in groups)
