"""The schedules GPipe, 1F1B, interleaved 1F1B and PipeDream, each as the order of a rank's passes."""

from __future__ import annotations

from collections.abc import Callable

from pdlcheck.primitives.arguments import require_at_least
from pdlcheck.primitives.pipeline.cells import Cell, Schedule, lay_out

__all__ = ["SCHEDULES", "gpipe", "interleaved_1f1b", "one_f_one_b", "pipedream"]


def gpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """Return the schedule that runs all forward passes, then all backward passes.

    Every rank holds ``n_microbatches`` activations at its peak.

    Args:
        n_stages: one on each rank.
        n_microbatches: parts of a batch.

    Raises:
        ValueError: an argument is below 1.

    Example:
        >>> print(gpipe(2, 2))
        gpipe: 2 stages on 2 ranks, 2 micro-batches, 6 steps
        step     0   1   2   3   4   5
        rank 0  F0  F1   .   .  B0  B1
        rank 1   .  F0  F1  B0  B1   .

    Source: Y. Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS
    (2019).
    """
    _require("gpipe", n_stages, n_microbatches)
    orders = [
        [Cell(stage, kind, microbatch) for kind in "FB" for microbatch in range(n_microbatches)]
        for stage in range(n_stages)
    ]
    return lay_out("gpipe", orders)


def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """Return the schedule in which each rank, once the pipeline is full, alternates backward and forward passes.

    It takes as long as GPipe. Stage ``s`` holds at most ``n_stages - s`` activations, for any number of micro-batches.

    Args:
        n_stages: as in :func:`gpipe`.
        n_microbatches: as in :func:`gpipe`.

    Raises:
        ValueError: an argument is below 1.

    Example:
        >>> [one_f_one_b(3, 8).peak_live(rank) for rank in range(3)]
        [3, 2, 1]

    Source: D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP (2019); with a
    flush after every batch as in S. Fan et al., "DAPPLE", PPoPP (2021).
    """
    _require("one_f_one_b", n_stages, n_microbatches)
    return lay_out("1f1b", [_one_f_one_b(stage, n_stages, n_microbatches) for stage in range(n_stages)])


def interleaved_1f1b(n_ranks: int, n_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Return 1F1B with several stages on each rank: rank ``r`` has stages ``r``, ``r + n_ranks``, ...

    The pipeline fills with passes that are ``stages_per_rank`` times shorter. So the ranks idle for less of the step,
    and send ``stages_per_rank`` times more messages.

    Args:
        n_ranks: ranks in the pipeline.
        n_microbatches: a multiple of ``n_ranks``.
        stages_per_rank: 1 is :func:`one_f_one_b`.

    Raises:
        ValueError: an argument is below 1, or ``n_microbatches`` is not a multiple of ``n_ranks``.

    Example:
        >>> interleaved_1f1b(2, 4).stage_ranks
        (0, 1, 0, 1)

    Source: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC
    (2021).
    """
    _require("interleaved_1f1b", n_ranks, n_microbatches, of_stages="n_ranks")
    require_at_least("interleaved_1f1b", "stages_per_rank", stages_per_rank, 1)
    if stages_per_rank == 1:
        return one_f_one_b(n_ranks, n_microbatches)
    if n_microbatches % n_ranks:
        raise ValueError(
            f"interleaved_1f1b needs n_microbatches to be a multiple of n_ranks={n_ranks}, "
            f"got n_microbatches={n_microbatches}; take {-(-n_microbatches // n_ranks) * n_ranks}, or 1f1b"
        )
    total, round_ = n_microbatches * stages_per_rank, n_ranks * stages_per_rank

    def cell(kind: str, position: int, rank: int) -> Cell:
        chunk = position % round_ // n_ranks
        chunk = chunk if kind == "F" else stages_per_rank - 1 - chunk
        return Cell(chunk * n_ranks + rank, kind, position // round_ * n_ranks + position % n_ranks)

    orders = []
    for rank in range(n_ranks):
        warm_up = min(2 * (n_ranks - rank - 1) + (stages_per_rank - 1) * n_ranks, total)
        order = [cell("F", position, rank) for position in range(warm_up)]
        for position in range(total - warm_up):
            order += [cell("F", warm_up + position, rank), cell("B", position, rank)]
        order += [cell("B", position, rank) for position in range(total - warm_up, total)]
        orders.append(order)
    return lay_out("interleaved 1f1b", orders)


def pipedream(n_stages: int, n_microbatches: int) -> Schedule:
    """Return the order of 1F1B, with an optimizer step after every backward pass: no rank waits for the end of a batch.

    The forward pass of micro-batch ``i`` in stage ``s`` uses weights after ``max(0, i - (n_stages - s) + 1)`` updates.
    Its backward pass uses the same weights, stashed, and its update is applied to the latest weights.

    Args:
        n_stages: one on each rank.
        n_microbatches: each takes an optimizer step.

    Raises:
        ValueError: an argument is below 1.

    Example:
        >>> pipedream(2, 4).asynchronous
        True

    Source: D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP (2019).
    """
    _require("pipedream", n_stages, n_microbatches)
    orders = [_one_f_one_b(stage, n_stages, n_microbatches) for stage in range(n_stages)]
    return lay_out("pipedream", orders, asynchronous=True)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved_1f1b,
    "pipedream": pipedream,
}


def _one_f_one_b(stage: int, n_stages: int, n_microbatches: int) -> list[Cell]:
    ahead = min(n_stages - stage, n_microbatches)
    order = [Cell(stage, "F", microbatch) for microbatch in range(ahead)]
    for microbatch in range(n_microbatches):
        order.append(Cell(stage, "B", microbatch))
        if microbatch + ahead < n_microbatches:
            order.append(Cell(stage, "F", microbatch + ahead))
    return order


def _require(caller: str, n_stages: int, n_microbatches: int, *, of_stages: str = "n_stages") -> None:
    require_at_least(caller, of_stages, n_stages, 1)
    require_at_least(caller, "n_microbatches", n_microbatches, 1)
