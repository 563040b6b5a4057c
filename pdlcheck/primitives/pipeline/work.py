"""What one step works on: the parts of its batch, and what is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pdlcheck.primitives.pipeline.alarm import Alarm
from pdlcheck.primitives.pipeline.batches import packed_as
from pdlcheck.primitives.pipeline.messages import Form, form_of
from pdlcheck.primitives.pipeline.shapes import Forms
from pdlcheck.primitives.pipeline.stage import Tensors

__all__ = ["Work", "form_of_batch", "leaves_of"]


@dataclass
class Work:
    """One step under way.

    Args:
        parts: the inputs of stage 0, a tuple of tensors for each micro-batch.
        packed: the user gave a tuple.
        targets: of each micro-batch, on the last stage.
        shares: how much each micro-batch's loss counts in the batch's.
        sources: tensors of the batch that have a graph, each with the leaf that stands for it: micro-batches cannot
            all go back through one graph.
        samples: in each micro-batch; known once the ranks agree.
        weights: how much each micro-batch counts beside those of other pipelines, where each of them is a step.
        counts: whether each micro-batch counts in any pipeline.
        backward: whether a backward pass will follow.
        keep_outputs: whether the last stage's outputs are wanted.
        forms: of messages, by the samples of a micro-batch; known once the ranks agree.
        alarm: of a step that is tried as the one before.
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
    """The batch with leaves for tensors that have a graph, which are noted in ``sources``."""
    if not isinstance(batch, Tensor):
        return packed_as(batch, [leaves_of(one, sources) for one in batch])
    if batch.grad_fn is None:
        return batch
    leaf = batch.detach().requires_grad_()
    sources.append((batch, leaf))
    return leaf


def form_of_batch(batch: Any) -> Form:
    return form_of((batch,), False) if isinstance(batch, Tensor) else form_of(batch, True)
