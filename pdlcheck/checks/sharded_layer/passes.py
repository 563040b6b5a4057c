"""One forward and one backward pass of a whole layer, and of the modules that ranks make from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.gradients.no_gradients import naming_parameters_without_gradient, without_gradient
from pdlcheck.checks.state import plain_name, whole

__all__ = ["Cut", "Pass", "Select", "Tensors", "on_a_rank", "select_of", "tensors_of", "values_of", "whole_pass"]

Tensors = tuple[Tensor, ...]
Select = Callable[..., Any]


@dataclass
class Pass:
    """One forward and backward pass, of one rank or of the whole layer.

    Args:
        inputs: of the module.
        learns: for each input, whether it takes a gradient.
        outputs: of the module.
        leads_back: whether some output requires a gradient.
        gradients_of_output: the gradients with which the backward pass began.
        inputs_grad: of each input; None if it takes no gradient, or if no gradient reached it.
        parameters_grad: by name.
        buffers: by name, after the pass.
        without_gradient: parameters that no gradient had reached before ``sync``.
    """

    inputs: Tensors
    learns: Sequence[bool]
    outputs: Tensors
    leads_back: bool
    gradients_of_output: Tensors
    inputs_grad: list[Tensor | None]
    parameters_grad: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    without_gradient: list[str]


@dataclass
class Cut:
    """The part of the layer that one rank holds, and its passes.

    Args:
        numbers: for each parameter of this rank, the numbers of its elements in the whole layer, counted from 1; 0 for
            an element that the whole layer does not have.
        values: of these parameters.
        passes: one for each batch.
        selected: for each batch, the right outputs and gradients of inputs of this rank, selected from the whole
            layer's.
    """

    numbers: dict[str, Tensor]
    values: dict[str, Tensor]
    passes: list[Pass]
    selected: list[tuple[Tensors, Tensors]]


def whole_pass(
    layer: nn.Module, inputs: Tensors, gradients: Tensors | None = None, learns: Sequence[bool] | None = None
) -> Pass:
    """Run one pass of the whole layer. The pass may change its buffers.

    ``learns`` says of each input whether its gradient is compared; None asks :func:`takes_gradient`.
    """
    of_outputs = lambda outputs: gradients or tuple(map(_drawn_like, outputs))  # noqa: E731
    return _pass(layer, layer, inputs, takes_gradient(inputs) if learns is None else learns, of_outputs)


def takes_gradient(inputs: Tensors) -> list[bool]:
    """Return, for each input of a batch, whether its gradient is compared.

    If some input requires a gradient, those that do not are left out. Otherwise all floating inputs count, except those
    that hold whole numbers or infinities beside others that do not, such as masks and positions.

    Example:
        >>> x, mask = torch.tensor([0.5, 2.0]), torch.tensor([0.0, -torch.inf])
        >>> takes_gradient((x, mask)), takes_gradient((mask,)), takes_gradient((x, x.clone().requires_grad_()))
        ([True, False], [True], [False, True])
    """
    if any(x.requires_grad for x in inputs):
        return [x.requires_grad for x in inputs]
    floating = [_is_a_number(x) for x in inputs]
    varied = [is_float and not _is_of_whole_numbers(x) for x, is_float in zip(inputs, floating, strict=True)]
    return varied if any(varied) else floating


def _is_a_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_of_whole_numbers(tensor: Tensor) -> bool:
    return not tensor.is_complex() and bool((tensor == tensor.round()).all())


def _pass(
    module: Callable[..., Any],
    parameters: nn.Module,
    inputs: Tensors,
    learns: Sequence[bool],
    gradient_of: Callable[[Tensors], Tensors],
    sync: Callable[[nn.Module], object] | None = None,
) -> Pass:
    parameters.zero_grad()
    given = tuple(x.detach().clone().requires_grad_(one) for x, one in zip(inputs, learns, strict=True))
    outputs = tuple(map(_joined, tensors_of(module(*given), "what the layer returns")))
    gradients, none = gradient_of(outputs), list[str]()
    if _fit_everywhere(outputs, gradients):
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        none = without_gradient(parameters)
        if sync is not None:
            with naming_parameters_without_gradient(parameters, asks=True):
                sync(parameters)
    grads = {name: None if p.grad is None else whole(p.grad) for name, p in parameters.named_parameters()}
    return Pass(
        tuple(x.detach() for x in given),
        learns,
        tuple(whole(y) for y in outputs),
        any(y.requires_grad for y in outputs),
        gradients,
        [None if x.grad is None else whole(x.grad) for x in given],
        grads,
        {plain_name(name): whole(buffer) for name, buffer in parameters.named_buffers()},
        none,
    )


def _joined(output: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor, so that the backward pass begins with a plain gradient of it."""
    gather: Any = getattr(output, "full_tensor", None)
    joined: Tensor = output if gather is None else gather()
    return joined


def _fit_everywhere(outputs: Tensors, gradients: Tensors) -> bool:
    """Return whether the backward pass can begin on all ranks.

    In a layer that communicates, no rank can run it alone.
    """
    fit = [y.shape for y in outputs] == [g.shape for g in gradients]
    if not dist.is_initialized():
        return fit
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, fit)
    return all(everywhere)


def _drawn_like(output: Tensor) -> Tensor:
    return torch.randn_like(output) if _is_a_number(output) else torch.zeros(output.shape, dtype=torch.float64)


def on_a_rank(
    shard: Callable[[nn.Module], nn.Module],
    layer: nn.Module,
    dtype: torch.dtype,
    truths: Sequence[Pass],
    inputs_of: Select | None,
    output_of: Select | None,
    sync: Callable[[nn.Module], object] | None,
) -> Cut:
    """Run on every rank: make the rank's module, and run one pass for each of ``truths``."""
    numbered, first = copy.deepcopy(layer), 1
    with torch.no_grad():
        for parameter in numbered.parameters():
            numbers = torch.arange(first, first + parameter.numel(), dtype=torch.float64)
            parameter.copy_(numbers.view(parameter.shape))
            first += parameter.numel()
    numbers_held = {name: _whole_numbers(held) for name, held in values_of(_module(shard, numbered)).items()}
    module = _module(shard, copy.deepcopy(layer)).to(dtype)
    cut = Cut(numbers_held, values_of(module), [], [])
    for truth in truths:
        inputs = select_of(inputs_of, truth.inputs, "inputs_of")
        marks = tuple(
            torch.full(x.shape, float(one), dtype=torch.float64)
            for x, one in zip(truth.inputs, truth.learns, strict=True)
        )
        learns = [
            (not mark.numel() or bool(mark.any())) and _is_a_number(x)
            for x, mark in zip(inputs, select_of(inputs_of, marks, "inputs_of"), strict=True)
        ]
        goals = select_of(output_of, truth.outputs, "output_of")
        gradients = select_of(output_of, truth.gradients_of_output, "output_of")
        wanted = tuple(
            torch.zeros(x.shape, dtype=torch.float64) if g is None else g
            for x, g in zip(truth.inputs, truth.inputs_grad, strict=True)
        )
        cut.passes.append(_pass(module, module, inputs, learns, lambda _, of=gradients: of, sync))  # type: ignore[misc]
        cut.selected.append((goals, select_of(inputs_of, wanted, "inputs_of")))
    return cut


def _whole_numbers(held: Tensor) -> Tensor:
    """Return ``held`` as integers, with -1 for an element that is not a whole number."""
    return torch.where(held == held.round(), held, -1).long()


def values_of(module: nn.Module) -> dict[str, Tensor]:
    """Return whole copies of the parameters in float64, by name."""
    return {name: whole(parameter).double() for name, parameter in module.named_parameters()}


def _module(shard: Callable[[nn.Module], nn.Module], layer: nn.Module) -> nn.Module:
    made = shard(layer)
    if not isinstance(made, nn.Module):
        raise TypeError(f"shard must return the module of this rank, it returned {type(made).__name__}")
    return made


def select_of(select: Select | None, tensors: Tensors, name: str) -> Tensors:
    """Return copies of the tensors that a function of the user selects; None selects all.

    Raises:
        TypeError: the function returns something else than tensors.
    """
    if select is None:
        return tensors
    return tuple(each.detach().clone() for each in tensors_of(select(*tensors), f"what {name} returns"))


def tensors_of(value: Any, who: str) -> Tensors:
    """Return a tensor or a tuple of tensors as a tuple.

    Raises:
        TypeError: an item is not a tensor.
    """
    tensors = tuple(value) if isinstance(value, tuple | list) else (value,)
    for each in tensors:
        if not isinstance(each, Tensor):
            raise TypeError(
                f"{who} must be a tensor or a tuple of tensors, got a {type(each).__name__}; put a module around the "
                "layer that takes and returns them"
            )
    return tensors
