"""The likely causes of ranks that differ, by what differs and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdlcheck.watching.comparison import Difference

__all__ = ["Evidence", "likely_cause", "ranks_of"]

_OTHER_MODELS = "the ranks built different models, or hold shards that are not DTensors, which ignore= leaves out"
_SCALE = (
    "a rank updated the scale from its own gradients: the gradients were not averaged, or a sharded model needs a "
    "scaler that agrees on inf and NaN over the ranks"
)
_NOT_AVERAGED = (
    "the gradients were not averaged over these ranks in this step, or a rank changed them after that, for example by "
    "a clip with its own norm"
)
_REPLICATED = "; if these ranks work on the same samples, their inputs or random numbers differ"
_START_SCALER = "the state of the scaler was loaded on some ranks only, or the ranks made it with different settings"
_START = "the first weights were not broadcast, or a rank changed or loaded its own after the broadcast"
_START_BUFFERS = (
    "the buffers were not broadcast, or each rank updated them from its own samples in the first forward pass, which "
    "buffers=False accepts"
)
_START_OPTIMIZER = "the state of the optimizer was loaded on some ranks only, or from different files"
_START_SETTINGS = "the ranks made their optimizers with different settings"
_SETTINGS = "a scheduler, or other code that sets it, ran on some ranks only, or not equally often"
_BUFFERS = "each rank updates the buffer from its own samples, or some ranks changed it; buffers=False accepts that"
_OPTIMIZER = "the state of the optimizer was changed or loaded on some ranks only"
_ONE = (
    "the gradients of this step and all other parameters agree: a memory error (silent data corruption), or code that "
    "writes this tensor on some ranks only"
)
_EARLIER = "the gradients of this step agree, so the fault is in an earlier one"
_OUTSIDE = "code outside the optimizer, such as a load or a clip, changed the parameters on some ranks only"
_STREAMS = "the ranks seeded it differently, or some drew more numbers from it than others"
_SAME_DATA = "no sampler divides the samples over the ranks, or it has the same rank everywhere"
_OTHER_DATA = "these ranks work on the same samples by same_samples=, but their samplers have different ranks or seeds"
_SAME_STREAM = "every rank uses the same seed; add the rank to it"
_STEPS = "the ranks compare at different steps: some have called compare(), or taken a step, more often"


class Evidence(NamedTuple):
    """What one comparison found.

    Args:
        step: the number of steps; 0 is before the first.
        right: the step of the last comparison in which all was equal; None if there is none.
        kinds: the kinds that differ.
        differences: the entries that differ.
        gradients: whether gradients were compared.
        parameters: the number of parameters that were compared.
        world_size: the number of ranks that were compared.
    """

    step: int
    right: int | None
    kinds: Sequence[str]
    differences: Sequence[Difference]
    gradients: bool
    parameters: int
    world_size: int

    @property
    def main_kind(self) -> str:
        """Return the kind that explains the others: weights differ if gradients did, and gradients if the scale did."""
        return next(kind for kind in _CAUSES if kind in self.kinds)

    def of(self, kind: str) -> list[Difference]:
        """Return the differences of a kind."""
        return [one for one in self.differences if one.kind == kind]


def likely_cause(seen: Evidence) -> str:
    """Return the likely cause of the differences of the main kind."""
    return _CAUSES[seen.main_kind](seen)


def _parameters(seen: Evidence) -> str:
    found = seen.of("parameters")
    if any(not one.same_text for one in found):
        return _OTHER_MODELS
    if seen.step == 0:
        return _START
    since = "" if seen.right is None else f", after step {seen.right}"
    if not seen.gradients:
        return f"in some step{since}, the gradients were not averaged, or some ranks did not take it, or {_OUTSIDE}"
    state = seen.of("optimizer state")
    if any(one.name.startswith("'step'") for one in state):
        return f"{_EARLIER}{since}: some ranks did not take it, or had no gradient of this parameter in it"
    if state:
        return f"{_EARLIER}{since}: its gradients were not averaged, or changed after that on some ranks"
    if len(found) == 1 < seen.parameters:
        return _ONE
    return f"{_EARLIER}{since}: its gradients were not averaged, or some ranks did not take it, or {_OUTSIDE}"


def _gradients(seen: Evidence) -> str:
    found = seen.of("gradients")
    lacking = [one for one in found if not one.same_text and "None" in one.texts.values()]
    if lacking:
        ranks = [rank for rank, text in lacking[0].texts.items() if text == "None"]
        return (
            f"on {ranks_of(ranks)} the backward pass did not reach this parameter, and the gradients were not averaged "
            "over the ranks, or only those that exist"
        )
    if any(not one.same_text for one in found):
        return _OTHER_MODELS
    some = any(len(one.texts) < seen.world_size for one in found)
    return f"{_NOT_AVERAGED}{_REPLICATED if some else ''}"


def _settings(seen: Evidence) -> str:
    return _START_SETTINGS if seen.step == 0 else _SETTINGS


def _optimizer(seen: Evidence) -> str:
    return _START_OPTIMIZER if seen.step == 0 else _OPTIMIZER


def _buffers(seen: Evidence) -> str:
    if any(not one.same_text for one in seen.of("buffers")):
        return _OTHER_MODELS
    return _START_BUFFERS if seen.step == 0 else _BUFFERS


_CAUSES: dict[str, Callable[[Evidence], str]] = {  # what explains others comes first
    "steps": lambda seen: _STEPS,
    "scaler": lambda seen: _SCALE if seen.step else _START_SCALER,
    "gradients": _gradients,
    "settings": _settings,
    "parameters": _parameters,
    "optimizer state": _optimizer,
    "buffers": _buffers,
    "random streams": lambda seen: _STREAMS,
    "same data": lambda seen: _SAME_DATA,
    "other data": lambda seen: _OTHER_DATA,
    "same stream": lambda seen: _SAME_STREAM,
}


def ranks_of(ranks: Sequence[int]) -> str:
    """Return ranks as text.

    Example:
        >>> ranks_of([1]), ranks_of([0, 2]), ranks_of(range(100))
        ('rank 1', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more')
    """
    listed = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"
