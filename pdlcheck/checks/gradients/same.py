"""The check that two ways to take a step give the same gradients, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks.message import Place, case, name_of, takes_world
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
    """Check that two pipelines leave the same gradients, bit for bit, under the same random numbers.

    Use it for recomputation, and for models with dropout, which cannot be compared with a single process. Buffers, and
    the random numbers drawn afterwards, must be equal too.

    Args:
        start: the subject, as in :func:`check_pipeline`.
        other: the reference, as in :func:`check_pipeline`.
        make: as in :func:`check_pipeline`; the dtype of the model is kept.
        batches: as in :func:`check_pipeline`.
        world: where the ranks run.
        world_size: number of ranks.
        seed: seed of the weights and of the random numbers of each rank.

    Raises:
        AssertionError: a gradient or a buffer differs. The message names step, rank, tensor and index.
        Inconclusive: no gradient differs between two seeds, so the model uses no random numbers.
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
                Place(rank),
                likely_cause="random numbers of the forward pass were not restored, or not put back"
                if "buffer" not in name
                else "the second forward pass changed buffers again",
                case=facts,
            )


def _held_after(start: Start, model: nn.Module, batches: Sequence[Batch], seed: int) -> Named:
    """Return the gradients, the buffers and the next random numbers of this rank."""
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
