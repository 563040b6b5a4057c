"""The number of times that each micro-batch counts in a gradient that is a weighted sum over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdlcheck.checks.pipeline.steps import tolerance

__all__ = ["counts_in"]

SHOWN = 4


def counts_in(found: Tensor, right: Tensor, parts: Sequence[Tensor]) -> str | None:
    """Return a text that names the micro-batches which do not count once in ``found``.

    Return None if ``found`` is no weighted sum of ``parts``, if several weightings fit, or if all micro-batches count
    equally often.

    Args:
        found: all elements of the wrong gradients, in float64.
        right: the right values of these elements.
        parts: the gradient of each micro-batch, up to a factor of its own.

    Example:
        >>> first, second = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
        >>> counts_in(2 * second, first + second, [first, second])
        'micro-batch 0 counts 0 times, micro-batch 1 counts 2 times, where each counts once'
    """
    matrix, goals = torch.stack(list(parts), 1), torch.stack([found, right], 1)
    if not goals.isfinite().all() or len(found) <= len(parts) or torch.linalg.matrix_rank(matrix) < len(parts):
        return None
    weights = torch.linalg.lstsq(matrix, goals).solution
    if not bool(((matrix @ weights - goals).abs() <= tolerance(right, len(parts))).all()):
        return None
    times = [round(one, 6) + 0.0 for one in (weights[:, 0] / weights[:, 1]).tolist()]  # 0 for -0
    if len(set(times)) == 1:  # the whole gradient is a multiple, which other candidates explain
        return None
    texts = [f"micro-batch {i} counts {one:g} times" for i, one in enumerate(times) if one != 1]
    return f"{', '.join(texts[:SHOWN])}{', ...' if texts[SHOWN:] else ''}, where each counts once"
