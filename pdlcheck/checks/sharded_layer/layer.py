"""The check that a layer divided over ranks computes what the whole layer computes on one process.

Users need not describe which part of the whole layer a rank holds. Each rank first divides a copy whose elements are
numbered, so the check finds the parts itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.checks.conditions import meet
from pdlcheck.checks.message import (
    case,
    name_of,
    require_list,
    takes_world,
)
from pdlcheck.checks.sharded_layer import causes as likely
from pdlcheck.checks.sharded_layer import siblings
from pdlcheck.checks.sharded_layer.comparisons import Terms, require_batch, require_elements
from pdlcheck.checks.sharded_layer.passes import (
    Cut,
    Pass,
    Select,
    Tensors,
    on_a_rank,
    tensors_of,
    whole_pass,
)
from pdlcheck.checks.state import made_wide
from pdlcheck.checks.tolerances import RELATIVE, require_dtype
from pdlcheck.errors import CheckFailed, Inconclusive

__all__ = ["check_sharded_layer"]

_UNEVEN = "a parameter that the ranks cannot divide evenly"


@takes_world
def check_sharded_layer(
    shard: Callable[[nn.Module], nn.Module],
    make: Callable[[], nn.Module],
    batches: Sequence[Tensor | Tensors],
    world: Any,
    *,
    world_size: int,
    inputs_of: Select | None = None,
    output_of: Select | None = None,
    sync: Callable[[nn.Module], object] | None = None,
    buffers: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> None:
    """Check that a sharded layer has the outputs, gradients and buffers of the whole layer.

    Gradients are those of inputs and of parameters. Buffers must have the same name and shape. The check is for tensor,
    sequence, context and expert parallel layers, including layers written by hand. It computes in float64. An element
    may be off by 1e-9 of the largest of its tensor, or by 2e-5 in float32. Some rank must hold each element of the
    whole layer. Elements that several ranks hold must get the same gradient bit for bit, or the copies drift apart.

    Args:
        shard: called on every rank with a copy of the same whole layer; returns the module of this rank. Its parameters
            are copies of elements of the whole layer's, in any shape and order, in float32 or float64. They may also
            have zeros, as where a vocabulary is padded.
        make: makes the whole layer, outside of the ranks. Modules that draw random numbers, such as dropout, must be in
            ``eval()``.
        batches: inputs of the whole layer, a tensor or a tuple of them; one forward and one backward pass for each. The
            gradients of floating inputs are compared. An input of whole numbers or infinities beside others, such as a
            mask or positions, is left out. If some inputs require a gradient, exactly those are compared.
        world: where the ranks run.
        world_size: number of ranks.
        inputs_of: called on every rank with the inputs of a batch; returns the part that this rank's module is given.
            It must only select, because it selects the gradients of inputs, too. None: each rank is given all inputs.
        output_of: called on every rank with the output of the whole layer; returns the output that this rank's module
            must return. None: all of it. Backward passes begin with the gradient of the whole output, selected in the
            same way. If all ranks return the whole output, each begins with the whole gradient, as if all computed the
            same loss.
        sync: called on every rank with its module after each backward pass, for example to add the gradients of
            parameters that several ranks hold.
        buffers: False if ranks keep statistics in another way than the whole layer, by intention.
        dtype: the dtype in which the layer computes and is compared; float32 for a layer that is written for float32 or
            casts to it.
        seed: of the weights, and of the gradient of the output.

    Raises:
        AssertionError: names batch, rank, tensor and index, and the likely cause: a sum over ranks that is missing or
            done twice, or elements that no rank holds. If no cause is known yet, the check first runs again with other
            divisions of the samples and with other strides.
        Inconclusive: the whole layer draws random numbers, or all its gradients are zero.

    Example:
        >>> import torch.distributed as dist
        >>> from pdlcheck.worlds import get_world
        >>> def part_of(x):
        ...     return x.detach().chunk(dist.get_world_size(), -1)[dist.get_rank()].clone()
        >>> class Columns(nn.Module):  # a rank has some of the output features; its part of dx is summed nowhere
        ...     def __init__(self, whole):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(part_of(whole.weight.T).T)
        ...     def forward(self, x):
        ...         return x @ self.weight.T
        >>> whole = lambda: nn.Linear(4, 2, bias=False)
        >>> world, x = get_world("sim"), torch.ones(1, 4)
        >>> check_sharded_layer(Columns, whole, [x], world, world_size=2, output_of=part_of)
        Traceback (most recent call last):
        pdlcheck.errors.CheckFailed: Columns: batch 0: rank 0 holds ... at (0, 0) of the gradient of its input, the ...
          wrong elements  4 of 4
          likely cause    it is this rank's own part: all ranks' parts add up to what is right
          case            world=sim world_size=2 seed=0
    """
    __tracebackhide__ = True
    require_list(batches, "check_sharded_layer takes as batches a list, one input of the layer each; pass [batch]")
    if not batches:
        raise ValueError("check_sharded_layer compares after each batch, it needs one or more, got none")
    if world_size < 2:
        raise ValueError(f"check_sharded_layer divides a layer, world_size must be at least 2, got {world_size}")
    require_dtype("check_sharded_layer", dtype)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = made_wide(make)
        layer = layer if dtype is torch.float64 else layer.to(dtype)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if parameter.is_complex():
                    raise TypeError(f"check_sharded_layer takes real parameters, {name!r} is {parameter.dtype}")
                parameter.copy_(parameter.float())  # so that a shard made in float32 is exact
        one = copy.deepcopy(layer)
        truths = [whole_pass(one, _cast(batch, dtype)) for batch in batches]
        again = whole_pass(copy.deepcopy(layer), _cast(batches[0], dtype), truths[0].gradients_of_output)
    who = name_of(shard)
    terms = Terms(case(world, world_size, seed=seed), RELATIVE[dtype])
    if not all(torch.equal(a, b) for a, b in zip(again.outputs, truths[0].outputs, strict=True)):
        raise Inconclusive(f"{who}: the whole layer draws random numbers, as dropout does; call .eval() on it in make")
    everyone: list[Cut] = world.run(
        on_a_rank, shard, layer, dtype, truths, inputs_of, output_of, sync, world_size=world_size
    )
    held = require_elements(who, layer, everyone, terms)

    def right(truth: Pass, cuts: Sequence[Cut]) -> bool:
        with suppress(CheckFailed, Inconclusive):
            require_batch("", 0, truth, layer, cuts, held, buffers, terms)
            return True
        return False

    trial = siblings.Trial(world, world_size, shard, layer, dtype, sync, terms.near, right)
    for number, truth in enumerate(truths):

        def rarer(where: str, nan: bool, of: Pass = truth) -> Iterator[likely.Cause]:
            failed = siblings.Sibling(trial.whole(of, of.inputs, of.gradients_of_output), inputs_of, output_of)
            yield from siblings.of_shares(trial, failed, where, nan)
            yield from siblings.of_strides(trial, failed, where)

        marked = any(x.requires_grad for x in tensors_of(batches[number], "a batch"))
        of_batch = terms._replace(rarer=rarer, marked=marked)
        require_batch(f"{who}: batch {number}:", number, truth, layer, everyone, held, buffers, of_batch)
    sizes = [size for parameter in layer.parameters() for size in parameter.shape]
    meet({_UNEVEN: any(size % world_size for size in sizes)} if sizes else {})


def _cast(batch: Tensor | Tensors, dtype: torch.dtype) -> Tensors:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors_of(batch, "a batch"))
