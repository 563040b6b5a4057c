"""One call into C++ for many tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pdlcheck.compat.private import take

__all__ = ["flatten_dense_tensors", "foreach_copy_", "foreach_mul_", "unflatten_dense_tensors"]

flatten_dense_tensors: Callable[[Sequence[Tensor]], Tensor] = take(
    "torch._utils._flatten_dense_tensors", "one flat message of many tensors", lost="the primitives send no buckets"
)
unflatten_dense_tensors: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]] = take(
    "torch._utils._unflatten_dense_tensors", "the tensors in a flat message", lost="the primitives read no buckets"
)
foreach_copy_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = take(
    "torch._foreach_copy_", "gradients copied into and out of a bucket", lost="DistributedDataParallel does not work"
)
foreach_mul_: Callable[[Sequence[Tensor], float], None] = take(
    "torch._foreach_mul_", "gradients in a bucket divided by the ranks", lost="DistributedDataParallel does not work"
)
