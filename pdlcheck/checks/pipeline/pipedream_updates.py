"""The weights after every optimizer step, recorded on each rank, and the first wrong update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from pdlcheck.checks.diagnosis import Candidate
from pdlcheck.checks.pipeline.steps import Named, Start, Step, is_near

__all__ = ["first_wrong_update", "watched"]

FIRST = "all weights were those of the start: the gradient is wrong, or the step of the optimizer"
LATER = (
    "the update of micro-batch 0 is right: a later one may have used other weights backwards than forwards, gone to "
    "weights that are not the latest, or kept a gradient of the one before"
)


def watched(start: Start, model: nn.Module) -> tuple[nn.Module, Step]:
    """Return the module of ``start``, with a step that records the weights.

    The step returns the weights after each step of one of the module's optimizers.
    """
    module, step = start(model)
    own = {id(parameter) for parameter in module.parameters()}

    def noted(inputs: Any, targets: Any) -> tuple[Tensor | None, list[Named]]:
        updates: list[Named] = []

        def note(optimizer: Optimizer, *_: Any) -> None:
            if any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
                updates.append({name: p.detach().clone() for name, p in module.named_parameters()})

        handle = register_optimizer_step_post_hook(note)
        try:
            step(inputs, targets)
        finally:
            handle.remove()
        return None, updates

    return module, noted


def first_wrong_update(
    everyone: Sequence[Sequence[Named]], right: Sequence[Named]
) -> tuple[dict[str, str], list[Candidate[Any]]]:
    """Return lines for a message that name the first wrong update, or a wrong number of updates; and hints to a cause.

    Both are empty if every recorded update is right, or if a rank has no record because its optimizer is not
    torch's.

    Args:
        everyone: the recorded weights of each rank.
        right: the weights of all stages after each micro-batch.
    """
    count = len(right)
    for rank, updates in enumerate(everyone):
        if not updates:  # the optimizer is not torch's
            return {}, []
        if len(updates) % count:
            return {"updates": f"rank {rank} steps its optimizer {len(updates)} times for {count} micro-batches"}, []
    for number, goal in enumerate(right):
        # A stage may have several optimizers, so take the record after the last one's step.
        found = [updates[(number + 1) * (len(updates) // count) - 1] for updates in everyone]
        fine = [all(is_near(own, goal[name]) for name, own in held.items()) for held in found]
        if not all(fine):
            wrong, others = ([str(rank) for rank, one in enumerate(fine) if one is which] for which in (False, True))
            text = f"the first that is wrong is that of micro-batch {number} on rank{'s' if wrong[1:] else ''} "
            text += ", ".join(wrong) + (f"; it is right on {', '.join(others)}" if others else "")
            return {"updates": text}, [Candidate.when(LATER if number else FIRST, True)]
    return {}, []
