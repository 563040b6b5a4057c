"""The check of a wrapper for data parallel training: it gives the gradient of one process and keeps replicas equal.

The wrapper may be ours, torch's or the user's own: any function from a module to a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.data_parallel.scenarios import (
    DTYPES,
    NO_SYNC,
    PASSES,
    SCALARS,
    SCENARIOS,
    UNUSED,
    Counting,
    FrozenLow,
    Scaled,
    Scenario,
    backward,
    layers,
    mean_square,
    without_sync,
)
from pdlcheck.checks.gradients.single_process import require_gradients
from pdlcheck.checks.message import Place, case, failure, first_index, name_of, show, takes_world
from pdlcheck.checks.replicas.in_sync import Look, require_in_sync
from pdlcheck.checks.state import device_of, scramble, whole
from pdlcheck.checks.tolerances import ABSOLUTE, RELATIVE, require_dtype
from pdlcheck.errors import PdlcheckError

__all__ = ["check_data_parallel"]

Wrap = Callable[[nn.Module], nn.Module]
Finish = Callable[[nn.Module], object]
Shard = tuple[Tensor, Tensor]


@takes_world
def check_data_parallel(
    wrap: Wrap,
    world: Any,
    *,
    world_size: int = 2,
    finish: Finish | None = None,
    unused: bool = True,
    no_sync: bool = True,
    buffers: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> None:
    """Check that replicas under ``wrap`` start equal, get the gradient of one process, and stay equal.

    The check uses models with several layers, tied and frozen parameters, frozen ones of another dtype, a parameter
    without dimensions, and outputs in nested containers. The parameter without dimensions is left out if ``wrap``
    raises ValueError for it, as ``fully_shard`` does; so is the frozen layer of another dtype. The check also takes two
    forward passes before one backward pass, and lets parameters become ready in another order on each rank. It takes
    three passes, because wrappers may learn from the first.

    Args:
        wrap: called as ``wrap(module)`` on every rank; may move ``module`` to a device. Returns a module that is called
            in its place, with data on the device of ``module``. Its backward pass leaves the mean over ranks in the
            gradients of ``module``, which the check compares. The modules hold a few hundred bytes: with buckets of the
            usual size there is only one bucket, so check with buckets of a few bytes too.
        world: where the ranks run.
        world_size: number of replicas, 2 or more.
        finish: the call that the training makes on the wrapper after the backward pass and before the optimizer's step.
            Megatron's wrapper needs ``lambda wrapped: wrapped.finish_grad_sync()``. A wrapper that keeps gradients
            elsewhere copies them into those of ``module`` here, and drops them in its ``zero_grad()``.
        unused: parameters may have no gradient, and these differ between ranks.
        no_sync: the wrapper has a context ``no_sync()`` in which gradients only accumulate; with ``finish``, the check
            reads them only after it. With ``unused``, too, some parameters are used in this context alone.
        buffers: all ranks use the same buffers in a forward pass; False if each rank keeps its own on purpose.
        dtype: dtype of models and data; float32 for a wrapper that keeps or reduces gradients in float32.
        seed: seed of weights and data.

    Raises:
        AssertionError: a gradient, a buffer or a replica is wrong. The message starts with the case
            (``wrap, tied weights: ...``), and names rank, parameter, index and the likely cause.

    Example:
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> def wrap(module):
        ...     return DistributedDataParallel(module, find_unused_parameters=True)
        >>> check_data_parallel(wrap, world)
    """
    __tracebackhide__ = True
    if world_size < 2:
        raise ValueError(f"check_data_parallel compares ranks, it needs world_size 2 or more, got {world_size}")
    shards = _shards(world_size, seed)
    facts = case(world, world_size, seed=seed)
    require_dtype("check_data_parallel", dtype)
    looks_inside, finish = finish is None, finish or _is_finished
    with_batch_norm, start = f"{name_of(wrap)}, batch norm", _start(wrap, finish)
    require_in_sync(with_batch_norm, start, world, Look(0, buffers=buffers), world_size=world_size, seed=seed)
    if buffers:
        _require_same_buffers(wrap, finish, world, world_size, facts)
    takes = {
        promise: _is_taken(wrap, model.to(dtype), world, world_size, words)
        for promise, model, words in (
            (SCALARS, Scaled(), "a parameter without dimensions"),
            (DTYPES, FrozenLow(), "frozen parameters of another dtype"),
        )
    }
    if no_sync and looks_inside:
        _require_local_without_sync(wrap, world, [(x.to(dtype), y.to(dtype)) for x, y in shards], facts)
    promised = {**takes, UNUSED: unused, NO_SYNC: no_sync}
    for scenario in SCENARIOS:
        if all(promised[one] for one in scenario.promised):
            _require_gradients(wrap, finish, scenario, shards, world, dtype, seed)
    require_in_sync(with_batch_norm, start, world, Look(3, buffers=False), world_size=world_size, seed=seed)


def _shards(world_size: int, seed: int) -> list[Shard]:
    """Return four samples for each rank.

    Their first features are positive on even ranks and negative on odd ranks. The second one is negative for the last
    sample alone.
    """
    generator = torch.Generator().manual_seed(seed)
    shards = []
    for rank in range(world_size):
        x = torch.randn(4, 2, generator=generator, dtype=torch.float64)
        x[:, 0] = (x[:, 0].abs() + 0.1) * (-1) ** rank
        x[:, 1] = (x[:, 1].abs() + 0.1) * torch.tensor([1, 1, 1, -1])
        shards.append((x, torch.randn(4, 1, generator=generator, dtype=torch.float64)))
    return shards


def _is_taken(wrap: Wrap, model: nn.Module, world: Any, world_size: int, words: str) -> bool:
    """Return whether the wrapper accepts the model, which has ``words``, on all ranks."""
    try:
        return all(world.run(_takes, wrap, model, world_size=world_size))
    except Exception as error:
        error.add_note(f"while check_data_parallel wrapped a model with {words}")
        raise


def _takes(wrap: Wrap, model: nn.Module) -> bool:
    """Return whether the wrapper accepts the model on this rank; a ValueError means that it does not."""
    try:
        wrap(model)
    except ValueError:
        return False
    return True


def _is_finished(_: nn.Module) -> None:
    """Do nothing: the gradients are complete when the backward pass returns."""


def _require_gradients(
    wrap: Wrap,
    finish: Finish,
    scenario: Scenario,
    shards: Sequence[Shard],
    world: Any,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Check that the wrapper's gradient, put in the place of the local one, is that of one process."""
    __tracebackhide__ = True

    def sync(model: nn.Module, num_samples: int) -> None:
        _pass_through_wrapper(wrap, finish, scenario, shards, model)

    who = f"{name_of(wrap)}, {scenario.name}"
    hint = "".join(one.hint for one in scenario.promised)
    require_gradients(
        scenario.make,
        mean_square,
        shards,
        sync,
        world,
        dtype=dtype,
        seed=seed,
        again=False,
        who=who,
        note=f"while check_data_parallel tried {who}{hint}",
    )


def _pass_through_wrapper(
    wrap: Wrap, finish: Finish, scenario: Scenario, shards: Sequence[Shard], model: nn.Module
) -> None:
    model.zero_grad()
    wrapped = wrap(model)
    dtype = next(model.parameters()).dtype
    x, y = (tensor.to(device_of(model), dtype) for tensor in shards[dist.get_rank()])
    # A sum over passes must differ from a sum over ranks.
    for _ in range(scenario.passes + (scenario.passes == len(shards))):
        scenario.drive(wrapped, x, y)
        finish(wrapped)


def _start(wrap: Wrap, finish: Finish) -> Callable[[], tuple[nn.Module, Callable[[int], object]]]:
    def start() -> tuple[nn.Module, Callable[[int], object]]:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()
        scramble(model)
        with torch.no_grad():
            model.get_buffer("1.running_var").abs_()
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(i: int) -> None:
            wrapped.zero_grad()
            backward(wrapped(torch.randn(4, 2, dtype=torch.float64).to(device_of(model))).square().mean())
            finish(wrapped)
            optimizer.step()

        return model, step

    return start


def _require_same_buffers(wrap: Wrap, finish: Finish, world: Any, world_size: int, facts: str) -> None:
    __tracebackhide__ = True
    everyone = world.run(_buffers_in_forward, wrap, finish, world_size=world_size)
    for forward in range(PASSES):
        for rank in range(1, world_size):
            found, expected = everyone[rank][forward], everyone[0][forward]
            if not torch.equal(found, expected):
                at = first_index(found != expected)[0]
                name = ["mean"] * 3 + ["seen"] + ["kept"] * 2
                raise failure(
                    f"{name_of(wrap)}, buffers: in forward pass {forward} rank {rank} sees {show(found[at])} in "
                    f"buffer {name[at]!r}, rank 0 sees {show(expected[at])}",
                    Place(rank, f"buffer {name[at]!r}", (), found[at], expected[at]),
                    likely_cause="buffers are not made alike before every forward pass"
                    if forward
                    else "buffers are not made alike at construction",
                    case=facts,
                )


def _buffers_in_forward(wrap: Wrap, finish: Finish) -> list[Tensor]:
    torch.manual_seed(dist.get_rank() + 1)
    model = Counting()
    scramble(model)
    wrapped = wrap(model)
    seen = []
    for _ in range(PASSES):
        held = wrapped(torch.full((2,), dist.get_rank() + 1.0).to(device_of(model)))
        seen.append(whole(held))
        backward(held.sum())
        finish(wrapped)
    return seen


def _require_local_without_sync(wrap: Wrap, world: Any, shards: Sequence[Shard], facts: str) -> None:
    """Check that inside of no_sync() a rank's gradient is that of its own samples."""
    __tracebackhide__ = True
    try:
        everyone = world.run(_gradients_without_sync, wrap, shards, world_size=len(shards))
    except Exception as error:
        if not isinstance(error, PdlcheckError):
            error.add_note(
                "while check_data_parallel tried a first backward pass inside of no_sync(); pass no_sync=False for a "
                "wrapper that does not take that, as torch's DistributedDataParallel with static_graph=True"
            )
        raise
    for rank, pairs in enumerate(everyone):
        for name, (found, expected) in pairs.items():
            relative, absolute = RELATIVE[expected.dtype], ABSOLUTE[expected.dtype]
            # Both gradients add up the same terms, so they may only differ by rounding.
            off = ~((found - expected).abs() <= relative * float(expected.abs().max()) + absolute)
            if off.any():
                at = first_index(off)
                raise failure(
                    f"{name_of(wrap)}, inside of no_sync(): rank {rank} holds {show(found[at])} at {at} of the "
                    f"gradient of {name!r}, its own samples give {show(expected[at])}",
                    Place(rank, f"gradient of {name!r}", at, found[at], expected[at]),
                    likely_cause="gradients are synchronised, or scaled, inside of no_sync()",
                    case=facts,
                )


def _gradients_without_sync(wrap: Wrap, shards: Sequence[Shard]) -> dict[str, tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    x, y = shards[dist.get_rank()]
    model = layers().to(x.dtype)
    wrapped = wrap(model)
    x, y = x.to(device_of(model)), y.to(device_of(model))
    with without_sync(wrapped):
        backward(mean_square(wrapped(x), y))
    found = {name: p.grad for name, p in model.named_parameters()}
    alone = dict(zip(found, torch.autograd.grad(mean_square(model(x), y), list(model.parameters())), strict=True))
    return {
        name: (whole(torch.zeros_like(alone[name]) if grad is None else grad), whole(alone[name]))
        for name, grad in found.items()
    }
