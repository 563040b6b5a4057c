"""Calls of a communication hook for each bucket, and checks of the future that it must return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdlcheck.compat.torch.futures import Future
from pdlcheck.primitives.data_parallel.buckets import Bucket, GradBucket

__all__ = ["Hook", "ask", "name_of", "take_answer"]

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
CURE = (
    "return a torch.futures.Future of the reduced buffer, such as "
    "dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])"
)


def name_of(hook: Hook) -> str:
    """Return the name of ``hook`` for messages."""
    return getattr(hook, "__qualname__", type(hook).__name__)


def ask(state: object, hook: Hook, bucket: Bucket, *, is_last: bool) -> str | None:
    """Call the hook for ``bucket``. If its result is not a future, mark the bucket and return the problem."""
    found: object = hook(state, GradBucket(bucket, is_last=is_last))
    if isinstance(found, Future):
        bucket.pending = found
        return None
    return _refused(bucket, f"the communication hook {name_of(hook)} returned {_kind(found)}; {CURE}")


def take_answer(hook: Hook, bucket: Bucket, value: object) -> str | None:
    """Copy the value of the future into ``bucket``. If it does not fit, mark the bucket and return the problem."""
    reduced = value[0] if isinstance(value, list | tuple) and value else value
    held, flat = f"the future that the communication hook {name_of(hook)} returned holds", bucket.numbers
    if not isinstance(reduced, Tensor):
        return _refused(bucket, f"{held} {_kind(reduced)}, not a tensor; {CURE}")
    if reduced.is_complex():
        reduced = torch.view_as_real(reduced.resolve_conj())
    if reduced.numel() != flat.numel():
        return _refused(bucket, f"{held} {reduced.numel()} numbers for a bucket of {flat.numel()}; {CURE}")
    if reduced.data_ptr() != flat.data_ptr() or reduced.dtype != flat.dtype:
        flat.copy_(reduced.reshape(-1))
    return None


def _refused(bucket: Bucket, problem: str) -> str:
    bucket.tail[-1] = 1  # the flag that reports a problem to the other ranks
    return problem


def _kind(found: object) -> str:
    return "None" if found is None else f"a {type(found).__name__}"
