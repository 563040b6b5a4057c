"""Notes on errors of a synchronising function: the parameters that have no gradient, by rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

__all__ = ["naming_parameters_without_gradient", "none_on", "without_gradient"]

_SHOWN = 3


def without_gradient(module: nn.Module) -> list[str]:
    """Return the names of the trainable parameters whose gradient is None."""
    return [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]


@contextmanager
def naming_parameters_without_gradient(module: nn.Module, *, asks: bool) -> Iterator[None]:
    """Add a note to an error of a synchronising call: which gradients are None on which rank.

    Enter the context on every rank, around the call.

    ``asks``: gather the names from all ranks first, so that a rank that waits for the others can report them too. Pass
    False if a rank may still be in its backward pass, such as a rank without samples that takes part in the passes of
    the others.
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
    """Return a text such as ``'norm' on rank 1, 'bias' on ranks 0, 1``; None if every rank has all gradients."""
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(everyone):
        for name in names:
            holders.setdefault(name, []).append(rank)
    told = [
        f"{name!r} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for name, ranks in list(holders.items())[:_SHOWN]
    ]
    return ", ".join([*told, *(["..."] if len(holders) > _SHOWN else [])]) or None
