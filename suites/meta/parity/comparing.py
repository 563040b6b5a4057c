"""The comparison of two worlds' results for one program."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from . import COARSE, collectives, refusals

__all__ = ["name", "of_this_torch", "on_both", "refuses", "same_weights"]

OTHERWISE = {  # program -> whether it behaves differently with this torch
    collectives.all_to_all_of_lists: torch.__version__ < (2, 13),  # gloo had no such operation
    refusals.group_with_a_rank_twice: torch.__version__ < (2, 13),  # gloo waited for ever
    refusals.bf16_hook_without_nccl: dist.is_nccl_available(),
}


def of_this_torch(programs):
    return [program for program in programs if not OTHERWISE.get(program)]


def on_both(worlds, program):
    """Return the text of every rank's result, so that 1, 1.0 and True differ and nan equals itself."""
    values = [world.run(program, world_size=4) for world in worlds]
    assert any(value is not None for value in values[0]), "the program returns nothing"
    return [[repr(value) for value in of_world] for of_world in values]


def name(value):
    return getattr(value, "__name__", None)


def refuses(world, program, refusal):
    kind, words = refusal
    try:
        returned = world.run(program, world_size=4)
    except Exception as refused:
        error = refused
    else:
        pytest.fail(f"{world.name} accepts what it is to refuse with {kind.__name__}: {words}; it returns {returned}")
    said = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    assert type(error) is kind, f"{world.name} refuses it, but says {said}"
    assert words in said, f"{world.name} refuses it, but says {said}"


def same_weights(program, simulated, real):
    """Check that two worlds end a training with the same weights."""
    # sums of four gradients in another order, a few steps: a few units in the last place of float32
    tolerance = {"rtol": COARSE.get(program, 1e-6), "atol": COARSE.get(program, 1e-6) / 2}
    for ours, theirs in zip(simulated, real, strict=True):
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, **tolerance)
