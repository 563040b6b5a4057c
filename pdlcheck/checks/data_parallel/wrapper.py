"""The check of a wrapper for data parallel training: it gives the gradient of one process and keeps replicas equal.

The wrapper may be ours, torch's or the user's own: any function from a module to a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.gradients.single_process import require_gradients
from pdlcheck.checks.message import case, failure, first_index, name_of, show, takes_world
from pdlcheck.checks.replicas.in_sync import check_replicas_in_sync
from pdlcheck.checks.state import device_of, scramble, whole
from pdlcheck.checks.tolerances import ABSOLUTE, RELATIVE, require_dtype
from pdlcheck.errors import PdlcheckError

__all__ = ["check_data_parallel"]

Wrap = Callable[[nn.Module], nn.Module]
Finish = Callable[[nn.Module], object]
Shard = tuple[Tensor, Tensor]

_NOT_PROMISED = {  # hints for a wrapper that raises in this case by design
    "parameters unused on other ranks each": "; pass unused=False for a wrapper that does not take such, as torch's "
    "DistributedDataParallel without find_unused_parameters=True",
    "accumulation without sync": "; pass no_sync=False for a wrapper that has no such context",
}
PASSES = 3  # wrappers that learn the order of gradients in the first pass work differently in the second


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

    The check uses models with several layers, tied and frozen parameters, a parameter without dimensions, and outputs
    in nested containers. The parameter without dimensions is left out if ``wrap`` raises ValueError for it, as
    ``fully_shard`` does. The check also takes two forward passes before one backward pass, and lets parameters become
    ready in another order on each rank. It takes three passes, because wrappers may learn from the first.

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
            reads them only after it.
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
    check_replicas_in_sync(_start(wrap, finish), world, world_size=world_size, steps=0, buffers=buffers, seed=seed)
    if buffers:
        _require_same_buffers(wrap, finish, world, world_size, facts)
    models: dict[str, Callable[[], nn.Module]] = {
        f"layers, after {PASSES} passes or more": _layers,
        "tied weights": _Tied,
        "a frozen layer": _Frozen,
        "outputs in nested containers": _Nested,
        "two forward passes before backward": _layers,
        "another order of gradients on each rank": _Crossed,
        "gradients that are kept and zeroed": _layers,
    }
    try:
        takes_scalars = all(world.run(_takes, wrap, _Scaled().to(dtype), world_size=world_size))
    except Exception as error:
        error.add_note("while check_data_parallel wrapped a model with a parameter without dimensions")
        raise
    if takes_scalars:
        models["a parameter without dimensions"] = _Scaled
    if unused:
        models["parameters unused on other ranks each"] = _Gated
    if no_sync and looks_inside:
        _require_local_without_sync(wrap, world, [(x.to(dtype), y.to(dtype)) for x, y in shards], facts)
    passes = PASSES if world_size != PASSES else PASSES + 1  # a sum over passes must differ from a sum over ranks
    require = partial(_require_gradients, wrap, finish, shards=shards, world=world, dtype=dtype, seed=seed)
    require("layers", _layers, passes=1)
    for what, make in models.items():
        require(what, make, passes=passes)
    if no_sync:
        require("accumulation without sync", _layers, passes=passes)
    check_replicas_in_sync(_start(wrap, finish), world, world_size=world_size, steps=3, buffers=False, seed=seed)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(2, 2), nn.Linear(2, 2)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.decode(torch.tanh(self.encode(x)))))


class _Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 1)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.body(x)))


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Any:
        return {"losses": [(self.first(x), None), (torch.tanh(self.second(x)), "text")]}


class _Scaled(nn.Module):
    """A model with a parameter without dimensions, such as the scale of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(2, 1), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Any:
        return self.scale * torch.tanh(self.body(x))


class _Crossed(nn.Module):
    """A model with branches of one shape, which odd ranks use in reverse order.

    A wrapper that pairs gradients in the order in which they become ready mixes them up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        order = list(self.branches)
        if dist.is_initialized() and dist.get_rank() % 2:
            order = order[::-1]
        return torch.stack([torch.tanh(branch(x)) for branch in order]).sum(0)


class _Gated(nn.Module):
    """A model with a branch for each sign of a sample's first feature, and one branch that no sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.positive, self.negative, self.never = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.body(x))
        total = y.sum(1, keepdim=True)
        for branch, mine in ((self.positive, x[:, :1] > 0), (self.negative, x[:, :1] < 0)):
            if mine.any():
                total = total + branch(y) * mine
        return total


class _Counting(nn.Module):
    """A model whose output is the values of its buffers, for any input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("kept", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Any:
        held = torch.cat([self.get_buffer(name).reshape(-1).double() for name in ("mean", "seen", "kept")])
        with torch.no_grad():  # each rank continues with values of its own, as in batch norm
            self.get_buffer("mean").add_(x.sum())
            self.get_buffer("seen").add_(int(x.sum()))
        return held + 0 * self.weight


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def _mean_square(output: Any, targets: Tensor) -> Tensor:
    return torch.stack([(y - targets).square().mean() for y in _tensors(output)]).sum()


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    inner = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for one in inner if not isinstance(one, str) for tensor in _tensors(one)]


def _shards(world_size: int, seed: int) -> list[Shard]:
    """Return four samples for each rank; their first features are positive on even ranks and negative on odd ranks."""
    generator = torch.Generator().manual_seed(seed)
    shards = []
    for rank in range(world_size):
        x = torch.randn(4, 2, generator=generator, dtype=torch.float64)
        x[:, 0] = (x[:, 0].abs() + 0.1) * (-1) ** rank
        shards.append((x, torch.randn(4, 1, generator=generator, dtype=torch.float64)))
    return shards


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
    what: str,
    make: Callable[[], nn.Module],
    *,
    passes: int,
    shards: Sequence[Shard],
    world: Any,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Check that the wrapper's gradient, put in the place of the local one, is that of one process."""
    __tracebackhide__ = True

    def sync(model: nn.Module, num_samples: int) -> None:
        _pass_through_wrapper(wrap, finish, what, shards, model, passes)

    sync.__name__ = f"{name_of(wrap)}, {what}"
    try:
        require_gradients(make, _mean_square, shards, sync, world, dtype=dtype, seed=seed, again=False)
    except Exception as error:
        if not str(error).startswith(sync.__name__):
            error.add_note(f"while check_data_parallel tried {sync.__name__}{_NOT_PROMISED.get(what, '')}")
        raise


def _pass_through_wrapper(
    wrap: Wrap, finish: Finish, what: str, shards: Sequence[Shard], model: nn.Module, passes: int
) -> None:
    model.zero_grad()
    wrapped = wrap(model)
    dtype = next(model.parameters()).dtype
    x, y = (tensor.to(device_of(model), dtype) for tensor in shards[dist.get_rank()])
    kept = what == "gradients that are kept and zeroed"
    for _ in range(passes):
        wrapped.zero_grad(set_to_none=not kept)
        if what == "two forward passes before backward":
            losses = [_mean_square(wrapped(part), target) for part, target in zip(x.chunk(2), y.chunk(2), strict=True)]
            _backward(sum(losses) / 2)
        elif what == "accumulation without sync":
            parts: Any = list(zip(x.chunk(4), y.chunk(4), strict=True))
            with _no_sync(wrapped):
                for part, target in parts[:-1]:
                    _backward(_mean_square(wrapped(part), target) / len(parts))
            _backward(_mean_square(wrapped(parts[-1][0]), parts[-1][1]) / len(parts))
        else:
            _backward(_mean_square(wrapped(x), y))
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
            _backward(wrapped(torch.randn(4, 2, dtype=torch.float64).to(device_of(model))).square().mean())
            finish(wrapped)
            optimizer.step()

        return model, step

    start.__name__ = f"{name_of(wrap)}, batch norm"
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
                    likely_cause="buffers are not made alike before every forward pass"
                    if forward
                    else "buffers are not made alike at construction",
                    case=facts,
                )


def _buffers_in_forward(wrap: Wrap, finish: Finish) -> list[Tensor]:
    torch.manual_seed(dist.get_rank() + 1)
    model = _Counting()
    scramble(model)
    wrapped = wrap(model)
    seen = []
    for _ in range(PASSES):
        held = wrapped(torch.full((2,), dist.get_rank() + 1.0).to(device_of(model)))
        seen.append(whole(held))
        _backward(held.sum())
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
                    likely_cause="gradients are synchronised, or scaled, inside of no_sync()",
                    case=facts,
                )


def _gradients_without_sync(wrap: Wrap, shards: Sequence[Shard]) -> dict[str, tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    x, y = shards[dist.get_rank()]
    model = _layers().to(x.dtype)
    wrapped = wrap(model)
    x, y = x.to(device_of(model)), y.to(device_of(model))
    with _no_sync(wrapped):
        _backward(_mean_square(wrapped(x), y))
    found = {name: p.grad for name, p in model.named_parameters()}
    alone = dict(zip(found, torch.autograd.grad(_mean_square(model(x), y), list(model.parameters())), strict=True))
    return {
        name: (whole(torch.zeros_like(alone[name]) if grad is None else grad), whole(alone[name]))
        for name, grad in found.items()
    }


def _no_sync(wrapped: nn.Module) -> Any:
    context: Any = getattr(wrapped, "no_sync", None)
    if context is None:
        raise ValueError(f"{type(wrapped).__name__} has no no_sync(); pass no_sync=False to check_data_parallel")
    return context()


def _backward(loss: Any) -> None:
    loss.backward()
