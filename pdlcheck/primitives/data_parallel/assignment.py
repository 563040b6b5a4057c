"""The assignment of gradients to buckets, and its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch.nn import Parameter

from pdlcheck.primitives.data_parallel.buckets import Bucket
from pdlcheck.primitives.data_parallel.sparse_bucket import SparseBucket
from pdlcheck.primitives.flat import gradient_dtype

__all__ = ["assign_buckets"]


def assign_buckets(
    params: Sequence[Parameter],
    bucket_caps: Sequence[int],
    reduce_dtype: torch.dtype | None = None,
    sparse: Collection[int] = (),
) -> list[Bucket]:
    """Return buckets, each closed when it reaches its cap, in the order of their last parameters.

    Args:
        params: the parameters, in the order in which their gradients become ready.
        bucket_caps: bytes that close the first bucket of a dtype on a device, the second, ...; the last entry holds for
            all further buckets. The first one is small, so that communication begins early.
        reduce_dtype: dtype of the buffers for float16 and bfloat16; None keeps the dtype of the gradients.
        sparse: ids of the parameters with sparse gradients; each of them has a bucket of its own.
    """
    kinds: dict[tuple[torch.dtype, torch.device], tuple[int, list[int]]] = {}
    closed: list[tuple[torch.dtype, list[int]]] = []
    begun: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for place, param in enumerate(params):
        dtype = gradient_dtype(param)
        low = reduce_dtype is not None and dtype in (torch.float16, torch.bfloat16)
        kind = reduce_dtype if low and reduce_dtype is not None else dtype, param.device
        if id(param) in sparse:
            closed.append((kind[0], [place]))
            continue
        filled, places = kinds.setdefault(kind, (0, []))
        places.append(place)
        filled += param.numel() * kind[0].itemsize
        kinds[kind] = filled, places
        if filled >= bucket_caps[min(begun[kind], len(bucket_caps) - 1)]:
            begun[kind] += 1
            closed.append((kind[0], kinds.pop(kind)[1]))
    closed += [(kind[0], places) for kind, (_, places) in kinds.items()]
    closed.sort(key=lambda entry: entry[1][-1])
    buckets: list[Bucket] = []
    for dtype, places in closed:
        held = [params[place] for place in places]
        if id(held[0]) in sparse:
            buckets.append(SparseBucket(len(buckets), held[0], dtype))
        else:
            buckets.append(Bucket(len(buckets), held, dtype))
    return buckets
