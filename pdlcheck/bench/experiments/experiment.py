"""The result of one experiment: a sentence with a verdict, and the points and lines of its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Experiment", "Plot", "Point"]


class Point(NamedTuple):
    """A measured value with its 95 % interval. ``x`` is a number, or the name of a category."""

    x: float | str
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Plot:
    """Measured points, with the lines of models, ideals and limits.

    Args:
        x: title of the axis, with its unit.
        y: title of the axis, with its unit.
        points: measured points, by the name of their series.
        lines: points ``(x, y)`` in the order of x, by name. The name of a prediction contains that word.
        levels: values of y, by name: a limit, an ideal.
        log_x: the x axis is logarithmic.
        log_y: the y axis is logarithmic.
    """

    x: str
    y: str
    points: Mapping[str, Sequence[Point]]
    lines: Mapping[str, Sequence[tuple[float | str, float]]] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Experiment:
    """A measurement compared with a model.

    Args:
        title: the question.
        sentence: measured values, the model, and the conclusion.
        error: the largest relative difference between them; None if the model predicts only which side is faster, or
            nothing.
        held: whether the difference is within the model's limit; None if the model has no limit.
        plot: the same values as a plot.
    """

    title: str
    sentence: str
    error: float | None = None
    held: bool | None = None
    plot: Plot | None = None
