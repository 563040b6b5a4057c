"""Two ways to take a step give the same gradients bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks.message import case, name_of, takes_world
from pdlcheck.checks.pipeline.steps import Batch, Named, Start, gradients_of
from pdlcheck.checks.state import made_by, require_bits, whole
from pdlcheck.errors import Inconclusive

__all__ = ["check_same_gradients"]


@takes_world
def check_same_gradients(
    start: Start,
    other: Start,
    make: Callable[[], nn.Module],
    batches: Sequence[Batch],
    world: Any,
    *,
    world_size: int,
    seed: int = 0,
) -> None:
    """Two pipelines must leave the same gradients bit for bit, from the same random numbers.

    For recomputation, and models with dropout, which no single process can be compared with. Buffers, and random
    numbers afterwards, must be the same too.

    Args:
        start, other: as in :func:`check_pipeline`; ``start`` is what is checked, ``other`` what it is compared with.
        make, batches, world, world_size, seed: as there; the dtype of the model is kept.

    Raises:
        AssertionError: names step, rank, tensor and index.
        Inconclusive: no gradient differs between two seeds, so that there are no random numbers to be seen.
    """
    __tracebackhide__ = True
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = made_by(make)
    runs = [
        world.run(_held_after, one, model, batches, number, world_size=world_size)
        for one, number in ((start, seed), (other, seed), (other, seed + 1))
    ]
    facts = case(world, world_size, seed=seed)
    drawn = [(a[n], b[n]) for a, b in zip(runs[1], runs[2], strict=True) for n in a if n.startswith("gradient")]
    if all(torch.equal(one, another) for one, another in drawn):
        raise Inconclusive(f"{name_of(other)}: gradients do not depend on random numbers, no fault would show")
    for rank, (found, expected) in enumerate(zip(runs[0], runs[1], strict=True)):
        for name, goal in expected.items():
            require_bits(
                f"{name_of(start)}: rank {rank}",
                name,
                (found.get(name), goal),
                f"{name_of(other)} holds",
                likely_cause="random numbers of the forward pass were not restored, or not put back"
                if "buffer" not in name
                else "the second forward pass changed buffers again",
                case=facts,
            )


def _held_after(start: Start, model: nn.Module, batches: Sequence[Batch], seed: int) -> Named:
    """On every rank: gradients, buffers and the next random numbers."""
    torch.manual_seed(1000 * seed + dist.get_rank())
    module, step = start(copy.deepcopy(model))
    held: Named = {}
    for number, (inputs, targets) in enumerate(batches):
        module.zero_grad()
        step(inputs, targets)
        held |= {f"gradient of {name!r} in step {number}": grad for name, grad in gradients_of(module).items()}
    held |= {f"buffer {name!r}": whole(buffer) for name, buffer in module.named_buffers()}
    held["the next random numbers"] = torch.rand(3)
    return held
