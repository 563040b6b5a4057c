"""The scenarios of ``check_data_parallel``: models, and ways to drive a wrapper of them through a pass.

A new scenario is one line in ``SCENARIOS``. It may need a new model, or a new way to drive one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "DTYPES",
    "NO_SYNC",
    "PASSES",
    "SCALARS",
    "SCENARIOS",
    "UNUSED",
    "Counting",
    "FrozenLow",
    "Promise",
    "Scaled",
    "Scenario",
    "backward",
    "layers",
    "mean_square",
    "without_sync",
]

Make = Callable[[], nn.Module]
Drive = Callable[[nn.Module, Tensor, Tensor], None]

PASSES: Final = 3  # wrappers that learn the order of gradients in the first pass work differently in the second


@dataclass(frozen=True)
class Promise:
    """A property that some wrappers do not have by design.

    Args:
        what: the property.
        hint: ends the note on the error of a wrapper that does not have it, and names the argument that leaves it out.
    """

    what: str
    hint: str = ""


@dataclass(frozen=True)
class Scenario:
    """A model, and the passes through a wrapper of it after which its gradients are compared.

    Args:
        name: in messages, after the name of the wrapper.
        make: makes the model.
        drive: takes one pass, forward and backward, with the wrapped model and this rank's inputs and targets. It
            begins with ``zero_grad``.
        passes: how many passes are taken; one more if that is also the number of ranks, because a sum over passes must
            differ from a sum over ranks.
        promised: the properties that a wrapper needs for this scenario; none if every wrapper should pass it.
    """

    name: str
    make: Make
    drive: Drive
    passes: int = PASSES
    promised: Sequence[Promise] = ()


# -- models ----------------------------------------------------------------------------------------


def layers() -> nn.Module:
    """Return a model of three layers."""
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


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


class _Low(nn.Module):
    """A vector that stays in bfloat16, whatever the rest of the model is cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.weight.data = self.weight.data.bfloat16()
        return self

    def forward(self, x: Tensor) -> Any:
        return x + self.weight.to(x.dtype)


class FrozenLow(nn.Module):
    """A model with a frozen layer of another dtype between its trained layers."""

    def __init__(self) -> None:
        """Make two trained layers and the frozen one."""
        super().__init__()
        self.first, self.places, self.last = nn.Linear(2, 2), _Low(), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Any:
        """Return the outputs of the last layer."""
        return self.last(torch.tanh(self.places(self.first(x))))


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Any:
        return {"losses": [(self.first(x), None), (torch.tanh(self.second(x)), "text")]}


class Scaled(nn.Module):
    """A model with a parameter without dimensions, such as the scale of logits."""

    def __init__(self) -> None:
        """Make a layer and its scale."""
        super().__init__()
        self.body, self.scale = nn.Linear(2, 1), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Any:
        """Return the scaled outputs."""
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


class _Routed(nn.Module):
    """A model with a branch for each sign of a sample's second feature, which is negative for a rank's last sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.early, self.last = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.body(x))
        total = y.sum(1, keepdim=True)
        for branch, mine in ((self.early, x[:, 1:] > 0), (self.last, x[:, 1:] < 0)):
            if mine.any():
                total = total + branch(y) * mine
        return total


class Counting(nn.Module):
    """A model whose output is the values of its buffers, for any input."""

    def __init__(self) -> None:
        """Make a weight and three buffers; two of the buffers are saved."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("kept", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Any:
        """Return the buffers, and change those that batch norm would change."""
        held = torch.cat([self.get_buffer(name).reshape(-1).double() for name in ("mean", "seen", "kept")])
        with torch.no_grad():  # each rank continues with values of its own, as in batch norm
            self.get_buffer("mean").add_(x.sum())
            self.get_buffer("seen").add_(int(x.sum()))
        return held + 0 * self.weight


# -- ways to drive a wrapped model -----------------------------------------------------------------


def mean_square(output: Any, targets: Tensor) -> Tensor:
    """Return the loss of all tensors in ``output``: the sum of their mean square errors."""
    return torch.stack([(y - targets).square().mean() for y in _tensors(output)]).sum()


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    inner = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for one in inner if not isinstance(one, str) for tensor in _tensors(one)]


def backward(loss: Any) -> None:
    """Take the backward pass of a loss."""
    loss.backward()


def without_sync(wrapped: nn.Module) -> Any:
    """Return the context of a wrapper in which gradients only accumulate."""
    context: Any = getattr(wrapped, "no_sync", None)
    if context is None:
        raise ValueError(f"{type(wrapped).__name__} has no no_sync(); pass no_sync=False to check_data_parallel")
    return context()


def _one_pass(wrapped: nn.Module, x: Tensor, y: Tensor) -> None:
    wrapped.zero_grad(set_to_none=True)
    backward(mean_square(wrapped(x), y))


def _one_pass_with_kept_gradients(wrapped: nn.Module, x: Tensor, y: Tensor) -> None:
    wrapped.zero_grad(set_to_none=False)
    backward(mean_square(wrapped(x), y))


def _two_forward_passes(wrapped: nn.Module, x: Tensor, y: Tensor) -> None:
    wrapped.zero_grad(set_to_none=True)
    losses = [mean_square(wrapped(part), target) for part, target in zip(x.chunk(2), y.chunk(2), strict=True)]
    backward(sum(losses) / 2)


def _accumulation(wrapped: nn.Module, x: Tensor, y: Tensor) -> None:
    wrapped.zero_grad(set_to_none=True)
    *parts, last = zip(x.chunk(4), y.chunk(4), strict=True)
    with without_sync(wrapped):
        for part, target in parts:
            backward(mean_square(wrapped(part), target) / 4)
    backward(mean_square(wrapped(last[0]), last[1]) / 4)


# -- the table -------------------------------------------------------------------------------------

SCALARS: Final = Promise("takes a parameter without dimensions")
UNUSED: Final = Promise(
    "takes parameters without gradients",
    "; pass unused=False for a wrapper that does not take such, as torch's DistributedDataParallel without "
    "find_unused_parameters=True",
)
DTYPES: Final = Promise("takes frozen parameters of another dtype")
NO_SYNC: Final = Promise("has a context no_sync()", "; pass no_sync=False for a wrapper that has no such context")

SCENARIOS: Final = (
    Scenario("layers", layers, _one_pass, passes=1),
    Scenario(f"layers, after {PASSES} passes or more", layers, _one_pass),
    Scenario("tied weights", _Tied, _one_pass),
    Scenario("a frozen layer", _Frozen, _one_pass),
    Scenario("outputs in nested containers", _Nested, _one_pass),
    Scenario("two forward passes before backward", layers, _two_forward_passes),
    Scenario("another order of gradients on each rank", _Crossed, _one_pass),
    Scenario("gradients that are kept and zeroed", layers, _one_pass_with_kept_gradients),
    Scenario("a parameter without dimensions", Scaled, _one_pass, promised=[SCALARS]),
    Scenario("parameters unused on other ranks each", _Gated, _one_pass, promised=[UNUSED]),
    Scenario("a frozen layer of another dtype", FrozenLow, _one_pass, promised=[DTYPES]),
    Scenario("accumulation without sync", layers, _accumulation, promised=[NO_SYNC]),
    Scenario("parameters used without sync only", _Routed, _accumulation, promised=[UNUSED, NO_SYNC]),
)
