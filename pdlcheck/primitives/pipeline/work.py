"""The work of one step: the parts of its batch, and the facts known about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pdlcheck.primitives.pipeline.batches import packed_as
from pdlcheck.primitives.pipeline.messages import Form, form_of
from pdlcheck.primitives.pipeline.shapes import Forms
from pdlcheck.primitives.pipeline.stage import Tensors
from pdlcheck.primitives.pipeline.step_veto import Alarm

__all__ = ["Work", "form_of_batch", "leaves_of"]


@dataclass
class Work:
    """One step in progress.

    Args:
        parts: the inputs of stage 0, a tuple of tensors for each micro-batch.
        packed: whether the user passed a tuple.
        targets: the targets of each micro-batch, on the last stage.
        shares: the share of each micro-batch's loss in the batch's loss.
        sources: tensors of the batch that have a graph, each with the leaf that replaces it. Several micro-batches
            cannot all go back through one graph.
        samples: number of samples in each micro-batch; known after the ranks agree.
        weights: the weight of each micro-batch beside those of other pipelines, if each micro-batch is a step.
        counts: whether each micro-batch has a weight in any pipeline.
        backward: whether a backward pass will follow.
        keep_outputs: whether the last stage keeps its outputs.
        forms: the forms of messages, by the samples of a micro-batch; known after the ranks agree.
        alarm: the alarm of a step that is tried as a repetition of the previous one.
    """

    parts: list[Tensors]
    packed: bool
    targets: list[Any]
    shares: list[float]
    backward: bool
    keep_outputs: bool
    sources: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    weights: Sequence[float] = ()
    counts: Sequence[bool] = ()
    forms: Forms = field(default_factory=dict)
    alarm: Alarm = field(default_factory=Alarm)


def leaves_of(batch: Any, sources: list[tuple[Tensor, Tensor]]) -> Any:
    """Return the batch with leaves in place of tensors that have a graph; add both to ``sources``."""
    if not isinstance(batch, Tensor):
        return packed_as(batch, [leaves_of(one, sources) for one in batch])
    if batch.grad_fn is None:
        return batch
    leaf = batch.detach().requires_grad_()
    sources.append((batch, leaf))
    return leaf


def form_of_batch(batch: Any) -> Form:
    """Return the form of a batch: a tensor, or a tuple of tensors."""
    return form_of((batch,), False) if isinstance(batch, Tensor) else form_of(batch, True)
