"""The result of one process on the whole batch."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.checks.pipeline.steps import (
    Loss,
    Named,
    all_names,
    gradients_of,
    is_near,
    joined_batch,
    on_cpu,
    samples_in,
    split_batch,
)
from pdlcheck.compat.torch.pytree import tree_leaves

__all__ = ["Truth"]


class Truth:
    """The result of one process on the whole batch.

    Args:
        model: the model before the step.
        loss: of outputs and targets.
        inputs: of the whole batch.
        targets: of the whole batch.
        n_microbatches: the number of parts of the batch.
        before: the gradients of the step before; empty in the first step.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, inputs: Any, targets: Any, n_microbatches: int, before: Named
    ) -> None:
        """Run the model once on the whole batch."""
        self.model, self.loss_of, self.before, self.count = model, loss, before, n_microbatches
        self.inputs, self.targets = inputs, targets
        self.samples = samples_in(inputs)
        self.outputs, self.loss, one = self.of(model, inputs, targets)
        self.gradients = gradients_of(one)
        self.have_none = {name for name, p in all_names(one).items() if p.grad is None}  # optimizers skip these
        self.parts = list(zip(split_batch(inputs, n_microbatches), split_batch(targets, n_microbatches), strict=True))

    def of(self, model: nn.Module, inputs: Any, targets: Any) -> tuple[Any, Tensor, nn.Module]:
        """Return the outputs, the loss, and a copy of the model with its gradients."""
        one = copy.deepcopy(model)
        one.zero_grad()
        outputs = one(inputs)
        value = self.loss_of(outputs, targets)
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return on_cpu(outputs), value.detach(), one

    @cached_property
    def unfit(self) -> str | None:
        """Return why a right pipeline may differ from one process on the whole batch, or None.

        The model may draw random numbers, or mix the samples of a batch.
        """
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(1)
            again = on_cpu(copy.deepcopy(self.model)(self.inputs))
            if not _are_near(again, self.outputs):
                return "gets other outputs each time: the model draws random numbers, as dropout does"
            leaves = tree_leaves(self.outputs)
            each = [isinstance(one, Tensor) and one.dim() and len(one) == self.samples for one in leaves]
            if not all(each) or not self.can_be_cut:
                return None
            joined = joined_batch([on_cpu(copy.deepcopy(self.model)(x)) for x, _ in self.parts])
        mixes = "gets other outputs from micro-batches: the model mixes samples, as batch norm does"
        return None if _are_near(joined, self.outputs) else mixes

    @property
    def can_be_cut(self) -> bool:
        """Return whether every micro-batch has samples. Not every model accepts a micro-batch without samples."""
        return self.samples >= self.count


def _are_near(found: Any, goal: Any) -> bool:
    pairs = zip(tree_leaves(found), tree_leaves(goal), strict=True)
    return all(is_near(one.nan_to_num(), other.nan_to_num()) for one, other in pairs if isinstance(one, Tensor))
