"""The check of a whole training, with the parts that a program has."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.checks.evidence.dropout import DRAWS
from pdlcheck.checks.message import validates_world
from pdlcheck.checks.training.parts import Parts
from pdlcheck.checks.training.properties import Property, properties_of
from pdlcheck.checks.training.report import Row, TrainingReport
from pdlcheck.errors import CheckFailed, Inconclusive, PdlcheckError, Unsupported, WorldUnavailable
from pdlcheck.seen_conditions import listening, publish

__all__ = ["check_training"]

_SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@validates_world
def check_training(
    make: Callable[[], nn.Module],
    world: Any,
    *,
    batches: Sequence[Any] = (),
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = _SGD,
    wrap: Callable[[nn.Module], nn.Module | tuple[nn.Module, Optimizer]] | None = None,
    step: Callable[[nn.Module, Optimizer, Any], object] | None = None,
    share: Callable[[Any], Any] | None = None,
    same_samples: Sequence[Sequence[int]] = (),
    train: Callable[[nn.Module, int], object] | None = None,
    reference: Callable[[nn.Module, int], object] | None = None,
    save: Callable[[Path, nn.Module, Optimizer], object] | None = None,
    load: Callable[[Path, nn.Module, Optimizer], object] | None = None,
    loader: Callable[[range, int], Any] | None = None,
    loader_options: Mapping[str, Any] | None = None,
    evaluate: Callable[..., Any] | None = None,
    samples: Sequence[Tensor] | None = None,
    world_size: int = 2,
    resume_world_size: int | None = None,
    dtype: torch.dtype = torch.float64,
    seconds: float = 30.0,
    seed: int = 0,
) -> TrainingReport:
    """Check a training with the parts that a program has: pick the checks, run them, and report on each property.

    Every part except ``make`` may be left out; then the properties that need it are not checked. First each property
    is checked once. While there is time, each is checked with more ranks, or with other points of saving, too.

    Args:
        make: returns the plain model, seeded as the program does.
        world: where the ranks run.
        batches: whole batches, each a tensor or a tuple, list or dict of tensors; their first dimension is the samples.
        loss: called as ``loss(model, batch)``; returns the mean loss of the samples of ``batch``.
        optimizer: called with the parameters of the wrapped model, and of the plain one.
        wrap: called as ``wrap(model)`` on every rank, such as ``DistributedDataParallel``. It may return
            ``(model, optimizer)``, as accelerate's ``prepare`` and Fabric's ``setup`` do; ``optimizer`` is then for
            plain code only.
        step: called as ``step(model, optimizer, batch)`` on every rank with its share of a batch: the program's own
            step, if it does more than ``zero_grad``, ``backward`` and ``step``, as micro-batches or clipping.
        share: returns the rank's share of a whole batch; by default equal parts of the first dimension, one for each
            rank or set of ``same_samples``.
        same_samples: sets of ranks that work on the same samples, as in tensor parallelism, and may draw the same
            random numbers: ``[[0, 1]]`` for two ranks. The checks of training then run with ``world_size`` ranks only.
        train: called as ``train(model, steps)`` on every rank, for a program that owns its loop; it replaces ``wrap``
            and ``step`` in the comparison with one process.
        reference: called in the same way: plain code for the same training. By default ``loss`` on whole batches; with
            a ``step`` of the program's own, or without ``loss``, the training of one rank.
        save: called as ``save(path, model, optimizer)`` on every rank; may make a folder of ``path``.
        load: called as ``load(path, model, optimizer)`` on every rank.
        loader: called as ``loader(dataset, epochs)`` on every rank; returns the content of the batches of each epoch,
            as ``visit`` of :func:`pdlcheck.checks.check_epoch_loop` does.
        loader_options: more arguments of that check, such as ``{"dealt_in": 4}`` for accelerate's loaders.
        evaluate: called as ``evaluate(model, *samples)`` on every rank with all samples; takes the rank's share, and
            returns what the program reports.
        samples: for ``evaluate``: tensors whose first dimension is the samples.
        world_size: number of ranks of the first case.
        resume_world_size: another number of ranks, which must resume from a checkpoint of ``world_size`` ranks. The
            data must not depend on the number of ranks, as with the default of ``share``.
        dtype: the lowest precision in which the training computes, as in
            :func:`pdlcheck.checks.check_same_trajectory`.
        seconds: the time after which no further case begins.
        seed: of weights and random streams.

    Returns:
        The report; ``print`` shows it as a table.

    Raises:
        AssertionError: a property does not hold. The message has the table, and the whole message of each failure.
        Inconclusive: no property could be compared.
        ValueError: the parts given allow no check.

    Example:
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from pdlcheck.worlds import get_world
        >>> batches = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(3)]
        >>> def loss(model, batch):
        ...     inputs, targets = batch
        ...     return nn.functional.mse_loss(model(inputs), targets)
        >>> report = check_training(
        ...     lambda: nn.Linear(3, 1), get_world("sim"), batches=batches, loss=loss, wrap=DistributedDataParallel
        ... )
        >>> report.count("wrong")
        0
    """
    __tracebackhide__ = True
    if not callable(make) or isinstance(make, nn.Module):
        raise TypeError(f"check_training takes as make a function that returns the model, got a {type(make).__name__}")
    if (save is None) != (load is None):
        raise ValueError(f"check_training needs both save= and load=, got {'save' if load is None else 'load'} alone")
    if (evaluate is None) != (samples is None):
        missing = "evaluate" if evaluate is None else "samples"
        raise ValueError(f"check_training needs both evaluate= and samples=, {missing} is missing")
    if resume_world_size is not None and (save is None or resume_world_size in (0, world_size)):
        raise ValueError(
            f"check_training needs save= and load= for resume_world_size={resume_world_size}, and another number of "
            f"ranks than world_size={world_size}"
        )
    together = [rank for ranks in same_samples for rank in ranks]
    if len(set(together)) < len(together) or not set(together) <= set(range(world_size)):
        raise ValueError(
            f"check_training takes as same_samples sets of the {world_size} ranks, each rank in one set at most, got "
            f"{same_samples!r}"
        )
    parts = Parts(
        make=make,
        batches=batches,
        loss=loss,
        optimizer=optimizer,
        wrap=wrap,
        step=step,
        share=share,
        same_samples=same_samples,
        train=train,
        reference=reference,
        save=save,
        load=load,
        loader=loader,
        loader_options=loader_options or {},
        evaluate=evaluate,
        samples=samples,
    )
    sizes = world_size, resume_world_size
    properties = list(properties_of(parts, world, sizes, dtype=dtype, seed=seed))
    if not properties:
        raise ValueError(
            "check_training has nothing to check: give batches= with loss= or step=, or train=, loader=, or evaluate= "
            "with samples="
        )
    report = _checked(properties, seconds)
    wrong = [row.error for row in report.rows if row.error is not None]
    if wrong:
        raise _failure(report, wrong)
    if not report.count("right"):
        raise Inconclusive(f"check_training: no property could be compared\n{report}")
    return report


def _checked(properties: Sequence[Property], seconds: float) -> TrainingReport:
    """Check the first case of each property, then the second of each, and so on until the time is spent."""
    end = time.monotonic() + seconds
    spent = f"the {seconds:g} s were spent, see seconds="
    rows = [Row(one.name, one.check, note=spent if one.cases else one.no_case) for one in properties]
    for number in range(max(len(one.cases) for one in properties)):
        for row, one in zip(rows, properties, strict=True):
            if number < len(one.cases) and time.monotonic() < end and row.verdict in ("not run", "right"):
                _check_case(row, one, number)
    return TrainingReport(rows)


def _check_case(row: Row, one: Property, number: int) -> None:
    """Run one case, and put its verdict into the row."""
    began, reports = time.monotonic(), list[tuple[str, dict[str, bool]]]()
    words, run = one.cases[number]
    try:
        with listening(lambda check, conditions: reports.append((check, dict(conditions)))):
            run()
    except (Inconclusive, Unsupported, WorldUnavailable) as error:
        if number:
            return  # the first case was right, and this world has too few ranks, or nothing to compare there
        if not isinstance(error, Inconclusive):
            raise
        row.verdict, row.note = "not compared", _first_line(error)
    except (AssertionError, PdlcheckError) as error:
        row.verdict, row.error = "wrong", error
        row.note = getattr(error, "cause", None) or _first_line(error)
    except Exception as error:
        error.add_note(f"while check_training checked: {one.name}, {words}")
        raise
    else:
        row.verdict, row.note = "right", None
    finally:
        row.seconds += time.monotonic() - began
    row.cases.append(words)
    for check, conditions in reports:
        conditions.pop(DRAWS, None)  # dropout is off in the comparison with one process
        publish(check, conditions)
        for condition, is_met in conditions.items():
            row.seen[condition] = row.seen.get(condition, False) or is_met


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _failure(report: TrainingReport, wrong: Sequence[Exception]) -> CheckFailed:
    """Return the error with the table, the messages of all failures, and the fields of the first."""
    __tracebackhide__ = True
    count = f"{len(wrong)} of {len(report.rows)} properties {'does' if len(wrong) == 1 else 'do'} not hold"
    parts = [f"check_training: {count}", str(report), *map(str, wrong)]
    first = next((one for one in wrong if isinstance(one, CheckFailed)), None)
    return CheckFailed("\n\n".join(parts), **(first.fields if first is not None else {}))
