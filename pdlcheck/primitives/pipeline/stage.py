"""One stage: its layers, the passes of micro-batches through them, and the state between a pass and its reverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.compat.torch.tensors import in_place_version
from pdlcheck.primitives.flat import gradient_dtype
from pdlcheck.primitives.pipeline.batches import packed_as
from pdlcheck.primitives.pipeline.calling import Values, call_with
from pdlcheck.primitives.pipeline.recompute import Recipe, start_recipe

__all__ = ["LossError", "Stage", "Tensors", "as_tensors", "leaf_of", "versions"]

Tensors = tuple[Tensor, ...]
Weights = Mapping[str, Tensor]


class LossError(ValueError):
    """Raised if a loss returns something other than one number."""


@dataclass
class Live:
    """The state of a micro-batch in a stage until its backward pass.

    Args:
        inputs: as the layers read them; their gradients go to the previous stage.
        roots: the start of the backward pass: the outputs, or the loss alone.
        packed: whether the previous stage sent a tuple.
        recipe: the starting state to compute ``roots`` again, if they were not kept.
        weights: the weights of the forward pass, if they are not the module's own.
    """

    inputs: Tensors
    roots: Tensors
    packed: bool
    recipe: Recipe | None = None
    weights: Weights | None = None


@dataclass
class Stage:
    """The layers of one stage.

    Args:
        index: counted from 0.
        layers: called one after the other, each with the output of the previous one, as in ``nn.Sequential``.
        device: the device of the layers.
        loss: ``loss(outputs, targets)`` on the last stage; None on the others.
        recompute: keep inputs instead of activations, and run the forward pass again before each backward pass.
        copies: whether the layers write their inputs, and so get copies of them.
        reached: whether a backward pass has gone through the stage.
    """

    index: int
    layers: nn.Module
    device: torch.device
    loss: Callable[..., Tensor] | None = None
    recompute: bool = False
    copies: bool = False
    reached: bool = False
    live: dict[int, Live] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        *,
        packed: bool = False,
        targets: Any = None,
        weights: Weights | None = None,
        keep: bool = True,
        keep_outputs: bool = False,
    ) -> Any:
        """Send ``inputs`` through the layers; return their output.

        Args:
            microbatch: the number under which the pass is kept.
            inputs: on the device of the stage.
            packed: pass them to the first layer as a tuple, even if there is only one.
            targets: the targets, on the last stage; without them there is no loss.
            weights: tensors to use in place of the parameters, by name.
            keep: whether a backward pass will follow.
            keep_outputs: keep detached outputs in ``outputs``.
        """
        if keep and self.index:
            inputs = tuple(leaf_of(tensor) for tensor in inputs)
        before = versions(inputs)
        if keep and self.recompute:
            recipe = start_recipe(self.layers, self.loss, self.device)
            with torch.no_grad():
                out, roots = self._run(inputs, packed, targets, weights)
        else:
            recipe = None
            with torch.set_grad_enabled(keep):
                out, roots = self._run(inputs, packed, targets, weights)
        if recipe is not None and versions(inputs) != before:
            raise RuntimeError(
                f"Pipeline cannot recompute stage {self.index}: its layers wrote their input in place, which they did "
                "not do on zeros; let the first layer write a clone, or take recompute=False"
            )
        if self.loss is not None and targets is not None:
            self.losses[microbatch] = roots[0].detach()
        if keep_outputs:
            self.outputs[microbatch] = _detached(out)
        if keep:
            if recipe is not None:
                recipe.targets, roots = targets, ()
            self.live[microbatch] = Live(inputs, roots, packed, recipe, weights)
        return out

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the reverse pass of ``microbatch``; gradients of the parameters are added to their ``grad``.

        Args:
            microbatch: the number of the micro-batch.
            gradients: the gradient of each floating-point root, None if no stage used the root; for the loss, its
                weight.

        Returns:
            The gradient of every floating-point input; None if the layers did not use it. Nothing in stage 0.
        """
        kept = self.live.pop(microbatch)
        roots = kept.roots
        if kept.recipe is not None:
            again = kept.recipe.again(self.layers, self.device)
            with again as buffers:
                overrides = {**buffers, **(kept.weights or {})}
                targets, of_loss = kept.recipe.targets, kept.recipe.loss_buffers
                _, roots = self._run(kept.inputs, kept.packed, targets, overrides or None, of_loss)
        floating = [root for root in roots if root.is_floating_point() or root.is_complex()]
        used = [(root, g) for root, g in zip(floating, gradients, strict=True) if root.requires_grad and g is not None]
        if used:
            self.reached = True
            torch.autograd.backward([root for root, _ in used], [gradient for _, gradient in used])
        return [tensor.grad for tensor in kept.inputs if tensor.requires_grad] if self.index else []

    def skip(self, microbatch: int) -> list[Tensor | None]:
        """Replace :meth:`backward` for a micro-batch whose loss has no weight; its gradients are zero.

        The mean loss over no targets is NaN, so a backward pass would spread NaN.
        """
        kept = self.live.pop(microbatch)
        inputs = [tensor for tensor in kept.inputs if tensor.requires_grad] if self.index else []
        if kept.weights is None:  # the other micro-batches of the batch give the gradients
            return [None] * len(inputs)
        for weight in kept.weights.values():  # the optimizer steps with zeros, as in other stages
            weight.grad = torch.zeros_like(weight, dtype=gradient_dtype(weight))
        return [torch.zeros_like(tensor) for tensor in inputs]

    def loss_of(self, outputs: Any, targets: Any, buffers: Values | None = None) -> Tensor:
        """Return the loss of a micro-batch. Raise LossError unless it is one number, whose share in the batch is known.

        Args:
            outputs: the outputs of the micro-batch.
            targets: the targets of the micro-batch.
            buffers: tensors to use in place of the loss's buffers, by name; its own buffers do not change.
        """
        assert self.loss is not None  # the caller checks it
        found: object
        if buffers and isinstance(self.loss, nn.Module):
            found = call_with(self.loss, buffers, outputs, targets)
        else:
            found = self.loss(outputs, targets)
        if isinstance(found, Tensor) and not found.dim():
            return found
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise LossError(
            f"Pipeline got {got} from loss, and a loss must be one number, as a tensor without dimensions; "
            "return the mean or the sum over samples"
        )

    def clear(self) -> None:
        """Discard the state of all passes."""
        self.live.clear()
        self.losses.clear()
        self.outputs.clear()

    def _run(
        self, inputs: Tensors, packed: bool, targets: Any, weights: Values | None, of_loss: Values | None = None
    ) -> tuple[Any, Tensors]:
        # Layers must write neither a leaf that requires a gradient nor the inputs of a second pass.
        if self.copies:
            inputs = tuple(tensor.clone() for tensor in inputs)
        x: Any = inputs if packed else inputs[0]
        out = self.layers(x) if weights is None else call_with(self.layers, weights, x)
        if self.loss is not None and targets is not None:
            return out, (self.loss_of(out, targets, of_loss),)
        return out, as_tensors(out, f"stage {self.index}")


def as_tensors(value: Any, who: str) -> Tensors:
    """Return a tensor, or a tuple or list of them, as a tuple. Raise TypeError for anything else."""
    tensors = tuple(value) if isinstance(value, tuple | list) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{who} returns {type(tensor).__name__}; what goes from stage to stage is a tensor or a tuple of them"
                f"{', such as tuple(found.values()) of a dict' if isinstance(tensor, dict) else ''}"
            )
    return tensors


def versions(tensors: Tensors) -> list[int]:
    """Return how often each tensor has been written in place; 0 for inference tensors, which do not count it."""
    return [0 if tensor.is_inference() else in_place_version(tensor) for tensor in tensors]


def leaf_of(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph, with a gradient of its own if it can have one."""
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return packed_as(value, [_detached(one) for one in value]) if isinstance(value, tuple | list) else value
