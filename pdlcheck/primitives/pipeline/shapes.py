"""The forms of messages, found before the first one is sent; stages that do not fit each other are detected then."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.compat.torch.pytree import tree_map
from pdlcheck.primitives.outputs import parameters_behind
from pdlcheck.primitives.pipeline.batches import moved
from pdlcheck.primitives.pipeline.calling import buffers_of, call_with
from pdlcheck.primitives.pipeline.cells import Schedule
from pdlcheck.primitives.pipeline.messages import Form, form_of
from pdlcheck.primitives.pipeline.stage import LossError, Stage, as_tensors, leaf_of, versions

__all__ = ["Forms", "find_forms"]

Forms = dict[int, list[Form]]  # by the samples of a micro-batch: the form of each stage's output


def find_forms(
    stages: Mapping[int, Stage],
    schedule: Schedule,
    inputs: Mapping[int, Form],
    targets: Mapping[int, Any],
    group: dist.ProcessGroup | None,
    *,
    unsaid: bool = False,
) -> Forms:
    """Run every stage, and the loss, once on zeros, one after the other, and send the forms of outputs to all ranks.

    A stage that writes its inputs in place gets copies of them from then on. If a stage does not use one of its inputs,
    that input gets no gradient; messages to the stages before it are flagged.

    Weights, buffers, gradients and random numbers do not change.

    Args:
        stages: the stages of this rank.
        schedule: gives the rank of each stage.
        inputs: on the rank of stage 0, the form of a micro-batch of each number of samples.
        targets: on the rank of the last stage, a micro-batch's targets for each number of samples, or None.
        group: the ranks; None if all stages are here.
        unsaid: whether no argument states that the loss is a mean, although it is treated as one.

    Raises:
        ValueError: on all ranks. A stage fails; the text names the stage, its input and the source of the input. Or the
            loss is not one number, or it adds over samples and no argument states so.
    """
    forms: Forms = {}
    before: Mapping[int, Form] = inputs
    last_unused = 0
    for index, place in enumerate(schedule.stage_ranks):
        found: list[Any] = [None]
        if index in stages:
            try:
                found = [{n: _try(stages[index], form, targets.get(n), unsaid) for n, form in before.items()}]
            except LossError as error:
                found = [str(error)]
            except Exception as error:  # any error of the user's layers is sent to all ranks
                shown = ", ".join(str(form) for form in dict.fromkeys(before.values()))
                source = "the inputs" if not index else f"what stage {index - 1} returns"
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                found = [f"stage {index} cannot take {source}, {shown}: {text}"]
        if group is not None and dist.get_world_size(group) > 1:
            dist.broadcast_object_list(found, group=group, group_src=place)
        if isinstance(found[0], str):
            raise ValueError(found[0])
        before = {samples: form for samples, (form, _) in found[0].items()}
        if any(unused for _, unused in found[0].values()):
            last_unused = index
        for samples, form in before.items():
            forms.setdefault(samples, []).append(form)
    return {n: [replace(f, flagged=place < last_unused) for place, f in enumerate(form)] for n, form in forms.items()}


def _try(stage: Stage, form: Form, targets: Any, unsaid: bool) -> tuple[Form, bool]:
    """Return the form of the stage's output, and whether the stage leaves an input unused."""
    with torch.inference_mode(False), torch.enable_grad():  # inference tensors count no writes
        zeros = [torch.zeros(shape, dtype=dtype, device=stage.device) for shape, dtype in form.tensors]
        leaves = [leaf_of(tensor) for tensor in zeros]
        inputs = tuple(leaf.clone() for leaf in leaves)  # a clone may be written
    before = versions(inputs)
    targets = moved(targets, stage.device)
    buffers, of_loss = buffers_of(stage.layers), buffers_of(stage.loss)
    cuda = [stage.device] if stage.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.enable_grad():
        out = call_with(stage.layers, buffers, inputs if form.packed else inputs[0])
        tensors = as_tensors(out, f"stage {stage.index}")
        roots = tensors if stage.loss is None or targets is None else (stage.loss_of(out, targets, of_loss),)
        if unsaid and roots is not tensors and _adds(stage.loss, out, targets, float(roots[0].detach())):
            raise LossError(
                "Pipeline takes loss for a mean over samples, and for twice the samples it is twice as large: pass "
                "reduction='sum' (or reduction='mean', if that is meant)"
            )
    stage.copies = stage.copies or versions(inputs) != before
    used = parameters_behind(roots)
    unused = any(leaf.requires_grad and id(leaf) not in used for leaf in leaves)
    return form_of(tensors, isinstance(out, tuple | list)), unused


def _adds(loss: Any, out: Any, targets: Any, value: float) -> bool:
    """Return whether ``loss`` doubles, from ``value``, if every sample occurs twice."""
    if not value or not math.isfinite(value):
        return False
    own = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss  # a loss may count its calls
    try:
        with torch.no_grad():
            double = float(own(tree_map(_twice, out), tree_map(_twice, targets)))
    except Exception:  # the loss may need a fixed number of samples; then the answer is unknown
        return False
    return abs(double - 2 * value) <= 1e-3 * abs(value)


def _twice(value: Any) -> Any:
    return torch.cat([value, value]) if isinstance(value, Tensor) and value.dim() else value
