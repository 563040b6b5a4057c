"""The check that PipeDream leaves the weights of its update rule, which a sequential simulation computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.checks.diagnosis import explain
from pdlcheck.checks.message import case, name_of, takes_world, wrong_on_ranks
from pdlcheck.checks.pipeline.pipedream_backward import at_latest_weights
from pdlcheck.checks.pipeline.pipedream_rules import Simulation, rules_of
from pdlcheck.checks.pipeline.pipedream_updates import first_wrong_update, watched
from pdlcheck.checks.pipeline.steps import (
    NEAR,
    Batch,
    Loss,
    Start,
    Taken,
    in_float64,
    is_near,
    require_all_held,
    require_near,
    train,
)
from pdlcheck.checks.state import in_dtype, made_by
from pdlcheck.errors import Inconclusive

__all__ = ["check_pipedream"]


@takes_world
def check_pipedream(
    start: Start,
    make: Callable[[], nn.Sequential],
    loss: Loss,
    batch: Batch,
    world: Any,
    *,
    world_size: int,
    n_microbatches: int,
    optimizer: Callable[[list[Tensor]], Optimizer],
    vertical_sync: bool = False,
    seed: int = 0,
) -> None:
    """Check that one call of ``step`` leaves the weights of PipeDream's rule.

    A simulation computes the expected weights, one micro-batch after the other. Stage s of n computes micro-batch i,
    forward and backward, with weights that have had ``max(0, i - (n - s) + 1)`` updates. With vertical sync the number
    is ``max(0, i - n + 1)`` in every stage. The update is applied to the latest weights.

    Args:
        start: as in :func:`check_pipeline`, but ``step`` also takes the steps of the optimizers, one after each
            backward pass. The parameters that rank r holds are stage r.
        make: makes a sequential model.
        loss: mean over a micro-batch.
        batch: cut by ``tensor_split`` into ``n_microbatches``; take more than twice as many as ranks.
        world: where the ranks run.
        world_size: number of ranks, one for each stage.
        n_microbatches: number of micro-batches, and of updates that every stage takes.
        optimizer: makes the optimizer of a stage, for the simulation.
        vertical_sync: whether all stages compute a micro-batch with the same number of updates.
        seed: of the model.

    Raises:
        AssertionError: names rank, tensor and index, and the first wrong update (for torch's optimizers). It also names
            another rule that explains the weights, in all stages or in one.
        Inconclusive: another rule gives the same weights, so no fault would show; or the simulation in one process does
            not give the same weights twice.

    Source: D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP (2019).
    """
    __tracebackhide__ = True
    inputs, targets = in_float64(batch[0]), in_float64(batch[1])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = made_by(make).double()
    everyone: list[list[Taken]] = world.run(
        train, partial(watched, start), model, [(inputs, targets)], None, world_size=world_size
    )
    stages = [sorted(ranks[0].weights) for ranks in everyone]
    parts = list(zip(inputs.tensor_split(n_microbatches), targets.tensor_split(n_microbatches), strict=True))
    who, facts = name_of(start), case(world, world_size, n_microbatches=n_microbatches, vertical_sync=vertical_sync)
    require_all_held(who, [ranks[0] for ranks in everyone], model, facts)
    right, others = rules_of(world_size, n_microbatches, vertical_sync=vertical_sync)
    simulation = Simulation(model, stages, in_dtype(loss, torch.float64), parts, optimizer)
    history = simulation.run([right] * world_size)
    expected = history[-1]
    for rule in others:
        other = simulation.run([rule] * world_size)[-1]
        if all(is_near(other[name], goal) for name, goal in expected.items()):
            raise Inconclusive(
                f"{who}: no fault would show, {rule.text!r} gives the same weights; take more micro-batches"
            )
    found = [one.weights for (one,) in everyone]
    wrong = [[name for name, own in held.items() if not is_near(own, expected[name])] for held in found]
    if not any(wrong):
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        again = simulation.run([right] * world_size)[-1]
    if not all(is_near(again[name].nan_to_num(), goal.nan_to_num()) for name, goal in expected.items()):
        text = "one process gets other weights each time: the model draws random numbers, as dropout does"
        raise Inconclusive(f"{who}: {text}; have make call eval()")
    rank, names = next((rank, names) for rank, names in enumerate(wrong) if names)
    details, hints = first_wrong_update([one.outputs for (one,) in everyone], history[1:])
    ends = {(rank, name): own for rank, held in enumerate(found) for name, own in held.items()}
    require_near(
        f"{who}: rank {rank} ends",
        f"parameter {names[0]!r}",
        found[rank][names[0]],
        expected[names[0]],
        rank,
        wrong_weights=wrong_on_ranks(wrong, [len(held) for held in found]),
        **details,
        likely_cause=explain(
            ends,
            *simulation.others(right, others, ends),
            *at_latest_weights(simulation, right, ends),
            tolerance=NEAR,
            hints=hints,
        ),
        case=facts,
    )
