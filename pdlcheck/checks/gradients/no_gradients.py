"""What is told where a function that synchronises meets parameters that no gradient has reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

__all__ = ["none_on", "tells_who_has_none", "without_gradient"]

_SHOWN = 3


def without_gradient(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]


@contextmanager
def tells_who_has_none(module: nn.Module, *, asks: bool) -> Iterator[None]:
    """Around a call that synchronises, on every rank: an error in it says which gradients are None on which rank.

    ``asks``: the others are asked, too, so that a rank which waits for them knows; False where one of them may still be
    in its backward pass, as one without samples that takes part in those of others.
    """
    everyone: list[Any] = [[]] * dist.get_world_size()
    own = without_gradient(module)
    if asks:
        dist.all_gather_object(everyone, own)
    else:
        everyone[dist.get_rank()] = own
    try:
        yield
    except Exception as error:
        if (told := none_on(everyone)) is not None:
            error.add_note(
                f"before the call .grad was None: {told}; no gradient has reached it there: give it zeros where other "
                "ranks have one, so that all take part, and leave out what is None on all"
            )
        raise


def none_on(everyone: Sequence[Sequence[str]]) -> str | None:
    """``'norm' on rank 1, 'bias' on ranks 0, 1``; None where every rank has all."""
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(everyone):
        for name in names:
            holders.setdefault(name, []).append(rank)
    told = [
        f"{name!r} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for name, ranks in list(holders.items())[:_SHOWN]
    ]
    return ", ".join([*told, *(["..."] if len(holders) > _SHOWN else [])]) or None
