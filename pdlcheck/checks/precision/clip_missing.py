"""The norms of a part of the gradients: each leaves out what a program may forget to count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

__all__ = ["parts_of"]

_MOST = 64  # gradients; more of them have too many parts whose norms are alike


def parts_of(
    gradients: Sequence[Sequence[Tensor | None]], counted: Sequence[Sequence[bool]]
) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield what is missing, in words, and the gradients that are left.

    Args:
        gradients: of each rank.
        counted: for each rank and gradient, whether it counts.
    """
    everyone = {
        (rank, place): grad
        for rank, (own, flags) in enumerate(zip(gradients, counted, strict=True))
        for place, (grad, counts) in enumerate(zip(own, flags, strict=True))
        if grad is not None and counts and grad.any()
    }
    if len(everyone) > _MOST:
        return
    missing: dict[frozenset[tuple[int, int]], str] = {}
    for at in everyone:
        missing[frozenset([at])] = f"gradient {at[1]} of rank {at[0]} is missing"
    for rank in range(len(gradients)):
        of_rank = frozenset(at for at in everyone if at[0] == rank)
        missing.setdefault(of_rank, f"the gradients of rank {rank} are missing")
    for place in {at[1] for at in everyone}:
        of_place = frozenset(at for at in everyone if at[1] == place)
        missing.setdefault(of_place, f"gradient {place} of every rank is missing")
    for dtype in dict.fromkeys(grad.dtype for grad in everyone.values()):
        of_dtype = frozenset(at for at, grad in everyone.items() if grad.dtype == dtype)
        missing.setdefault(of_dtype, f"the gradients of {dtype} are missing")
    for dims in sorted({grad.dim() for grad in everyone.values()}):
        of_dims = frozenset(at for at, grad in everyone.items() if grad.dim() == dims)
        missing.setdefault(of_dims, f"the gradients with dim() == {dims} are missing")
    for left_out, text in missing.items():
        if left_out and len(left_out) < len(everyone):
            yield text, [grad for at, grad in everyone.items() if at not in left_out]
