"""The private names of torch's tensors and storages."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from pdlcheck.compat.private import take, uses

__all__ = [
    "base_of",
    "in_place_version",
    "is_wrapped",
    "local_tensor",
    "sparse_parts",
    "sparse_values",
    "storage_key",
    "untyped_storage_of",
    "unwrapped",
]

_CUDA: Final = "--cuda-as-cpu"
_SPARSE: Final = "operations on sparse tensors"

is_wrapped: Any = take(
    "torch._C._functorch.is_functorch_wrapped_tensor", "the memory of tensors inside of torch.func", lost=_CUDA
)
unwrapped: Any = take("torch._C._functorch.get_unwrapped", "the memory of tensors inside of torch.func", lost=_CUDA)


@uses("torch.UntypedStorage._cdata", lost="whether tensors share memory; every world needs it")
def storage_key(storage: Any) -> Any:
    """Return a number that is equal for storages of one memory."""
    return storage._cdata


@uses("torch.Tensor._version", lost="the simulated world does not detect that ranks share a tensor")
def in_place_version(tensor: Tensor) -> int:
    """Return how often a tensor was written in place, to see whether another rank writes it."""
    return tensor._version


@uses("torch.Tensor._base", lost="outputs that require grad are not refused as gloo refuses them")
def base_of(tensor: Tensor) -> Tensor | None:
    """Return the base tensor of a view, to refuse views of leaves as outputs."""
    return tensor._base


@uses("torch.Tensor._indices", lost=_SPARSE)
def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse COO tensor, coalesced or not."""
    return tensor._indices(), sparse_values(tensor)


@uses("torch.Tensor._values", lost=_SPARSE)
def sparse_values(tensor: Tensor) -> Tensor:
    """Return the values of a sparse COO tensor, coalesced or not."""
    return tensor._values()


def local_tensor(tensor: Tensor) -> Any:
    """Return the local shard of a DTensor, which has the memory; None for other tensors."""  # in late_names.py
    return getattr(tensor, "_local_tensor", None)


@uses("torch.storage.TypedStorage._untyped_storage", lost="torch.load of old files under --cuda-as-cpu")
def untyped_storage_of(storage: Any) -> Any:
    """Return the untyped storage inside of a typed one, which has the memory; an untyped storage itself."""
    return getattr(storage, "_untyped_storage", storage)
