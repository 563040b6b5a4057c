"""The check that a pipeline computes what one process computes on the whole batch.

It compares outputs, loss, gradients and weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.checks.message import (
    Place,
    best_fit,
    case,
    failure,
    first_index,
    name_of,
    show,
    takes_world,
    wrong_on_ranks,
)
from pdlcheck.checks.pipeline.causes import Causes
from pdlcheck.checks.pipeline.exchanged import tensors_exchanged
from pdlcheck.checks.pipeline.places import (
    diagnose_outputs,
    has_right_ones,
    localise_error,
    of_later_microbatches,
    wrong_parts,
)
from pdlcheck.checks.pipeline.steps import (
    Batch,
    Loss,
    Named,
    Start,
    Taken,
    in_float64,
    is_near,
    named_weights,
    require_all_held,
    require_near,
    samples_in,
    tolerance,
    train,
)
from pdlcheck.checks.pipeline.truth import Truth
from pdlcheck.checks.state import in_dtype, made_by, require_bits, tied_names
from pdlcheck.compat.torch.pytree import tree_leaves
from pdlcheck.errors import CheckFailed, Inconclusive

__all__ = ["check_pipeline"]

NO_GRADIENT = "one process has no gradient there; zeros are one, for an optimizer that decays weights or has momentum"
RIGHT_GRADIENT = (
    "its gradient is right: step changes weights itself, where the check steps the optimizer; or one parameter's step "
    "depends on others, which the rank does not hold"
)


@takes_world
def check_pipeline(
    start: Start,
    make: Callable[[], nn.Module],
    loss: Loss,
    batches: Sequence[Batch],
    world: Any,
    *,
    world_size: int,
    n_microbatches: int,
    results: bool = True,
    optimizer: Callable[[list[Tensor]], Optimizer] | None = None,
    seed: int = 0,
) -> None:
    """Check that the ranks together hold, after every step, what one process holds that takes the whole batch at once.

    Outputs, loss and gradients may be off by 1e-9 of their largest element, and weights by 1e-9 of theirs. In float64,
    sums in another order are off by 1e-13. If two ranks hold a parameter of one name, or two names are tied in the
    model, gradients and weights must be equal bit for bit.

    Args:
        start: called on every rank with a copy of the same float64 model, under different random numbers. Returns a
            module and ``step``. The module has the parameters that this rank holds, under the names of the model.
            ``step(inputs, targets)`` does the forward and backward passes of a batch, which every rank is given whole.
            It returns ``(loss, outputs)`` where it has them, ``(loss, None)`` without outputs, and None without either.
            The check calls ``zero_grad`` and steps the optimizers.
        make: makes the model; no batch norm or dropout, which see micro-batches.
        loss: of outputs and targets, a mean or a sum over samples.
        batches: one for each step, not all of one size; three or more show momentum. Inputs and targets are tensors, or
            tuples, lists and dicts of them.
        world: where the ranks run.
        world_size: number of ranks.
        n_microbatches: parts of a batch, for the likely cause of a wrong number.
        results: False if no rank returns the loss and outputs of the whole batch, as with replicas.
        optimizer: makes the optimizer; SGD with momentum if None.
        seed: of the model.

    Raises:
        AssertionError: names step, rank, tensor, index, the place between layers of a sequential model and the likely
            cause. Causes are a lost scale, a micro-batch left out or taken twice, outputs in another order, tied copies
            that were not added, and gradients of the step before.
        Inconclusive: the gradient of one process is zero; or something differs, and the model draws random numbers or
            mixes samples.
    """
    __tracebackhide__ = True
    if not batches:
        raise ValueError("check_pipeline compares after each step, it needs a batch or more, got none")
    optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    batches = [(in_float64(x), in_float64(y)) for x, y in batches]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = made_by(make).double()
    everyone: list[list[Taken]] = world.run(train, start, model, batches, optimizer, world_size=world_size)
    samples = [samples_in(x) for x, _ in batches]
    facts = case(world, world_size, n_microbatches=n_microbatches, samples=samples, seed=seed)
    who = name_of(start)
    loss, own = in_dtype(loss, torch.float64), copy.deepcopy(model)
    steps = optimizer(list(own.parameters()))
    before: Named = {}
    for number, (inputs, targets) in enumerate(batches):
        truth = Truth(own, loss, inputs, targets, n_microbatches, before)
        if not any(grad.any() for grad in truth.gradients.values()):
            raise Inconclusive(f"{who}: the gradient of step {number} is zero, no fault would show")
        taken = [ranks[number] for ranks in everyone]
        when = f"{who}: in step {number}"
        require_all_held(when, taken, own, facts)
        try:
            if results:
                _require_results(when, taken, truth, facts, batches, number)
            _require_gradients(when, taken, truth, facts)
        except CheckFailed:
            if truth.unfit:
                raise Inconclusive(f"{when} one process {truth.unfit}; have make call eval()") from None
            raise
        _require_equal_copies(when, taken, own, facts)
        own.zero_grad()
        for name, parameter in own.named_parameters():
            parameter.grad = None if name in truth.have_none else truth.gradients[name].clone()
        steps.step()
        weights = named_weights(own)
        for rank, one in enumerate(taken):
            for name, found in one.weights.items():
                require_near(
                    f"{when}: rank {rank} ends",
                    f"parameter {name!r}",
                    found,
                    weights[name],
                    rank,
                    likely_cause=NO_GRADIENT if name in truth.have_none else RIGHT_GRADIENT,
                    case=facts,
                )
        before = truth.gradients


def _require_results(
    when: str, taken: Sequence[Taken], truth: Truth, facts: str, batches: Sequence[Batch], number: int
) -> None:
    __tracebackhide__ = True
    given = [rank for rank, one in enumerate(taken) if one.loss is not None]
    if not given:
        raise failure(f"{when} no rank returned a loss; results=False accepts that", case=facts)
    for rank in given:
        one = taken[rank]
        found, goals = tree_leaves(one.outputs), tree_leaves(truth.outputs)
        if one.outputs is None:
            found, goals = [], []
        if len(found) != len(goals):
            raise failure(f"{when} rank {rank} returns {len(found)} outputs, one process {len(goals)}", case=facts)
        for place, (value, goal) in enumerate(zip(found, goals, strict=True)):
            if not isinstance(goal, Tensor):
                continue
            if not isinstance(value, Tensor) or value.shape != goal.shape:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise failure(
                    f"{when} rank {rank} returns outputs of shape {shape}, "
                    f"those of one process have {tuple(goal.shape)}",
                    likely_cause="outputs of some micro-batches are missing, or not put together",
                    case=facts,
                )
            if not is_near(value, goal):
                require_near(
                    f"{when} rank {rank} returns",
                    "the outputs",
                    value,
                    goal,
                    rank,
                    wrong_outputs=wrong_parts(value, goal, truth.count),
                    likely_cause=diagnose_outputs(
                        value,
                        goal,
                        truth.count,
                        tensors_exchanged(truth, found),
                        of_later_microbatches(value, partial(_outputs, truth, batches, place), number, truth.count),
                    ),
                    case=facts,
                )
        assert one.loss is not None  # the rank is one of those that returned a loss
        rounding = 4 * torch.finfo(one.loss.dtype).eps * abs(float(truth.loss))  # for a loss in float32
        if not abs(float(one.loss) - float(truth.loss)) <= tolerance(truth.loss) + rounding:
            factor = float(one.loss) / float(truth.loss) if truth.loss else math.inf
            fit = f"{factor:.6g} times the loss of one process, n_microbatches = {truth.count}"
            raise failure(
                f"{when} rank {rank} returns the loss {show(one.loss)}, one process has {show(truth.loss)}",
                Place(rank, "loss", (), one.loss, truth.loss),
                best_fit=fit if truth.loss else None,
                likely_cause=Causes(truth).diagnose_loss(one.loss),
                case=facts,
            )


def _outputs(truth: Truth, batches: Sequence[Batch], place: int) -> list[Tensor]:
    """Return one output of one process for each batch."""
    return [tree_leaves(truth.of(truth.model, x, y)[0])[place] for x, y in batches]


def _require_gradients(when: str, taken: Sequence[Taken], truth: Truth, facts: str) -> None:
    __tracebackhide__ = True
    everyone = [one.gradients for one in taken]
    for rank, own in enumerate(everyone):
        for name, grad in own.items():
            if grad.shape != truth.gradients[name].shape:
                raise failure(
                    f"{when} rank {rank} holds {name!r} in shape {tuple(grad.shape)}, in the model it is of shape "
                    f"{tuple(truth.gradients[name].shape)}",
                    likely_cause="a part of the parameter: check_pipeline compares whole ones; check_sharded_layer "
                    "checks divided layers",
                    case=facts,
                )
    wrong = [[name for name, grad in own.items() if not is_near(grad, truth.gradients[name])] for own in everyone]
    if not any(wrong):
        return
    is_partial = has_right_ones(everyone, wrong, truth.gradients)
    rank, names = next((rank, names) for rank, names in enumerate(wrong) if names)
    own, name = everyone[rank], names[0]
    at = first_index(~((own[name] - truth.gradients[name]).abs() <= tolerance(truth.gradients[name])))
    raise failure(
        f"{when} rank {rank} holds {show(own[name][at])} at {at} of the gradient of {name!r}, "
        f"one process on the whole batch holds {show(truth.gradients[name][at])}",
        Place(rank, f"gradient of {name!r}", at, own[name][at], truth.gradients[name][at]),
        wrong_gradients=wrong_on_ranks(wrong, [len(own) for own in everyone]),
        best_fit=best_fit([own[name] for name in names], [truth.gradients[name] for name in names]),
        goes_wrong=localise_error(truth.model, everyone, wrong, truth.gradients),
        likely_cause=Causes(truth).diagnose(everyone, wrong, is_partial=is_partial),
        case=facts,
    )


def _require_equal_copies(when: str, taken: Sequence[Taken], model: nn.Module, facts: str) -> None:
    """Check that parameters of one name, or tied in the model, are equal bit for bit on all ranks."""
    __tracebackhide__ = True
    same = {name: group[0] for group in tied_names(model) for name in group}
    first: dict[str, tuple[int, str]] = {}
    for rank, one in enumerate(taken):
        for name in one.weights:
            source, alias = first.setdefault(same.get(name, name), (rank, name))
            for what, values in (("gradient of ", "gradients"), ("parameter ", "weights")):
                require_bits(
                    f"{when} rank {rank}",
                    f"{what}{name!r}",
                    (getattr(one, values)[name], getattr(taken[source], values)[alias]),
                    f"rank {source} holds in its copy {alias!r}",
                    Place(rank),
                    likely_cause="copies were not synchronised, or added in another order",
                    case=facts,
                )
