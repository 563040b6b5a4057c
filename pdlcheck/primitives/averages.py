"""Means of named tensors over the ranks of a group, with a few numbers in the same message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.flat import flatten, sum_dtype, unflatten, wire_buckets

__all__ = ["averages"]


def averages(
    caller: str,
    tensors: Mapping[str, Tensor],
    world_size: int,
    group: dist.ProcessGroup | None,
    *,
    tail: Sequence[float] = (),
    check: Callable[[Sequence[float]], None] | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Return the mean of each tensor over the ranks, and the sum of each number of ``tail``. The tensors do not change.

    The cost is one all_reduce for each dtype. The tail travels in the first of them, so it adds no message. A mean of
    integers is exact or an error. Each rank divides its integers by the number of ranks and sends quotients and
    remainders, whose sums do not overflow.

    Args:
        caller: the name of the calling function, for the error text.
        tensors: same names, shapes and dtypes in the same order on every rank; at least one if there is a tail.
        world_size: ranks in the group.
        group: process group; ``None`` is the default group.
        tail: small whole numbers, the same count on every rank.
        check: called with the sums of the tail before the next message; may raise.

    Raises:
        ValueError: integers have no integer mean; on every rank alike, after all messages.
    """
    if world_size == 1:  # a tensor of one rank is its own mean, and a number its own sum
        alone = {name: value.detach().to(sum_dtype(value.dtype), copy=True) for name, value in tensors.items()}
        if check is not None:
            check(tail)
        return alone, [float(number) for number in tail]
    names, values = list(tensors), list(tensors.values())
    found: dict[str, Tensor] = {}
    sums: list[float] = []
    wrong: list[tuple[int, int]] = []
    for number, bucket in enumerate(wire_buckets(values, sum_dtype)):
        chosen = [values[position] for position in bucket]
        dtype = sum_dtype(chosen[0].dtype)
        extra = [torch.tensor(tail, dtype=dtype, device=chosen[0].device)] if tail and not number else []
        exact = dtype == torch.int64
        parts = _divided(chosen, world_size) if exact else chosen
        flat = flatten([*parts, *extra], dtype)
        dist.all_reduce(flat, group=group)
        if extra:
            flat, summed = flat[: -len(tail)], flat[-len(tail) :]
            sums = [float(value) for value in (summed.real if dtype.is_complex else summed).tolist()]
            if check is not None:
                check(sums)
        totals = unflatten(flat, parts)
        for place, position in enumerate(bucket):
            if not exact:
                found[names[position]] = totals[place] / world_size
                continue
            mean, inexact = _whole_mean(totals[place], totals[len(bucket) + place], world_size)
            shift = _shift(chosen[place])
            found[names[position]] = mean ^ shift
            if inexact is not None:
                wrong.append((position, inexact - world_size * shift))
    if wrong:
        position, total_found = wrong[0]
        raise ValueError(
            f"{caller} cannot average {names[position]!r}, {values[position].dtype}: "
            f"the sum over {world_size} ranks is {total_found}, its mean is not an integer; "
            "pass buffers='broadcast' or buffers='keep'"
        )
    return found, sums


def _shift(value: Tensor) -> int:
    """Return the offset of a uint64 from the int64 in which it travels, or 0. The mean has the same offset."""
    return -(2**63) if value.dtype == torch.uint64 else 0


def _divided(values: Sequence[Tensor], divisor: int) -> list[Tensor]:
    """Return the quotients of all tensors, then their remainders."""
    wide = [value.detach().to(torch.int64) ^ _shift(value) for value in values]
    return [value // divisor for value in wide] + [value % divisor for value in wide]


def _whole_mean(quotients: Tensor, remainders: Tensor, world_size: int) -> tuple[Tensor, int | None]:
    """Return the mean from the sums of quotients and remainders, and the first sum without an integer mean, if any."""
    mean, left = quotients + remainders // world_size, remainders % world_size
    if not bool(left.any()):
        return mean, None
    return mean, int(mean[left != 0][0]) * world_size + int(left[left != 0][0])
