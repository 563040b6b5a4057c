"""The properties of a training: which checks its parts allow, and with which arguments, the plainest case first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from pdlcheck.checks.checkpoint.resume import check_resume
from pdlcheck.checks.data.epoch_loop import check_epoch_loop
from pdlcheck.checks.metrics.metric import check_metric
from pdlcheck.checks.randomness.streams import check_random_streams
from pdlcheck.checks.replicas.in_sync import check_replicas_in_sync, check_same_start
from pdlcheck.checks.training.parts import Parts, size_of
from pdlcheck.checks.trajectories.trajectory import check_same_trajectory, check_world_size_does_not_matter

__all__ = ["Case", "Property", "properties_of"]


class Case(NamedTuple):
    """One call of a check, and its words for the report."""

    words: str
    run: Callable[[], object]


class Property(NamedTuple):
    """A property of a training.

    Args:
        name: the words of the report.
        check: the name of the check.
        cases: the calls of the check. The first is the plainest; the others widen it if there is time.
        no_case: the reason why there is no case.
    """

    name: str
    check: str
    cases: Sequence[Case]
    no_case: str | None = None


def properties_of(
    parts: Parts, world: Any, world_sizes: tuple[int, int | None], *, dtype: torch.dtype, seed: int
) -> Iterator[Property]:
    """Yield the properties that the parts allow to check.

    Args:
        parts: of the training.
        world: where the ranks run.
        world_sizes: the number of ranks of the first cases, and the number that resumes a checkpoint of so many.
        dtype: the lowest precision in which the training computes.
        seed: of weights and random streams.
    """
    world_size, resume_world_size = world_sizes
    sizes = [world_size] if parts.same_samples else list(dict.fromkeys([world_size, 3, 4]))
    if parts.trains:
        alike = partial(check_same_start, parts.wrapped_model, world, seed=seed)
        yield Property("all ranks start with the same weights", "check_same_start", _on_each(sizes, alike))
    if parts.trains or parts.train is not None:
        yield _of_one_process(parts, world, sizes, {"seed": seed, "dtype": dtype})
    if parts.trains:
        steps = min(2 * len(parts.batches), 8)
        in_sync = partial(check_replicas_in_sync, parts.training, world, steps=steps, seed=seed)
        yield Property("replicas stay equal", "check_replicas_in_sync", _on_each(sizes, in_sync))
        streams = partial(
            check_random_streams, parts.training, parts.training_step, world, same_samples=parts.same_samples
        )
        yield Property("ranks draw random numbers of their own", "check_random_streams", _on_each(sizes, streams))
    if parts.trains and parts.save is not None:
        yield _of_resuming(parts, world, world_size, seed)
        if resume_world_size is not None:
            yield _of_other_ranks(parts, world, (world_size, resume_world_size), seed)
    if parts.loader is not None:
        numbers = (world_size, 24 * world_size), (world_size, 24 * world_size + 1), (3, 73)
        visited = partial(
            check_epoch_loop, parts.loader, world, **{"same_samples": parts.same_samples, **parts.loader_options}
        )
        visits = [
            Case(f"{samples} samples, world_size={size}", partial(visited, num_samples=samples, world_size=size))
            for size, samples in numbers
            if size in sizes
        ]
        yield Property("ranks share the samples of each epoch", "check_epoch_loop", visits)
    if parts.samples is not None:
        reported = partial(check_metric, parts.report, parts.samples, world)
        reports = [
            Case(f"world_sizes=({size},)", partial(reported, world_sizes=(size,), min_samples=size)) for size in sizes
        ]
        yield Property("metrics are those of one process", "check_metric", reports)


def _of_one_process(parts: Parts, world: Any, sizes: Sequence[int], options: dict[str, Any]) -> Property:
    """Return the comparison with plain code; with one rank if there is no plain code for the program's own step."""
    own_loop, whole = parts.train is not None, [size_of(batch) for batch in parts.batches]
    even = [size for size in sizes if own_loop or all(samples % parts.shares(size) == 0 for samples in whole)]
    no_case = f"the samples of each batch must divide evenly over {' or '.join(map(str, sizes))} ranks, got {whole}"
    trained = parts.train if parts.train is not None else parts.own_training
    plainly = parts.reference
    if plainly is None and parts.loss is not None and parts.step is None and not own_loop:
        plainly = parts.plain_training
    options = {"steps": max(3, min(len(parts.batches) + 1, 6)), **options}
    if plainly is not None:
        compared = partial(check_same_trajectory, trained, plainly, parts.make, world, **options)
        return Property(
            "training equals that of one process", "check_same_trajectory", _on_each(even, compared), no_case
        )
    checked = partial(check_world_size_does_not_matter, trained, parts.make, world, **options)
    cases = [Case(f"world_sizes=(1, {size})", partial(checked, world_sizes=(1, size))) for size in even]
    return Property("training equals that of one rank", "check_world_size_does_not_matter", cases, no_case)


def _of_resuming(parts: Parts, world: Any, world_size: int, seed: int) -> Property:
    """Return the comparison with a training without a stop: a save within an epoch, at its end, and in the second."""
    epoch = len(parts.batches)
    resumed = partial(check_resume, parts.saved_training, world, world_size=world_size, seed=seed)
    cases = []
    for point in dict.fromkeys([max(2, epoch // 2), epoch, epoch + 1]):
        steps = max(point, epoch) + epoch
        words = f"saved after {point} of {steps} steps"
        cases.append(Case(words, partial(resumed, saved_after=point, steps=steps)))
    return Property("a resumed training goes on as without a stop", "check_resume", cases)


def _of_other_ranks(parts: Parts, world: Any, sizes: tuple[int, int], seed: int) -> Property:
    """Return the check of a checkpoint of ``sizes[0]`` ranks that ``sizes[1]`` ranks load."""
    name, epoch = "other ranks resume a training", len(parts.batches)
    whole = [size_of(batch) for batch in parts.batches]
    if parts.same_samples:
        return Property(name, "check_resume", [], "same_samples= is that of one number of ranks")
    if any(samples % size for samples in whole for size in sizes):
        listed = " and ".join(map(str, sizes))
        no_case = f"the samples of each batch must divide evenly over {listed} ranks, got {whole}"
        return Property(name, "check_resume", [], no_case)
    point = max(2, epoch // 2)
    run = partial(
        check_resume,
        parts.saved_training_of_any_ranks,
        world,
        world_size=sizes[0],
        resume_world_size=sizes[1],
        saved_after=point,
        steps=max(point, epoch) + epoch,
        seed=seed,
    )
    return Property(name, "check_resume", [Case(f"saved by {sizes[0]} ranks, resumed on {sizes[1]}", run)])


def _on_each(sizes: Sequence[int], check: Callable[..., object]) -> list[Case]:
    return [Case(f"world_size={size}", partial(check, world_size=size)) for size in sizes]
