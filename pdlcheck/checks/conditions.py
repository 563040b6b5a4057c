"""The conditions under which faults show: a check that passes reports which of them its run has met.

A condition is one line in the table below. It is a noun phrase, as in "not seen: a rank without samples", and a
predicate over the arguments of the check. Conditions that only the run itself can show are reported by :func:`meet`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from pdlcheck.seen_conditions import publish

__all__ = ["BUCKETS", "CONDITIONS", "EMPTY", "ONE_EACH", "meet", "reporting"]

Arguments = Mapping[str, Any]  # of the call, defaults included
Predicate = Callable[[Arguments], bool]

BUCKETS = "three or more collectives in a step"
EMPTY = "a rank without samples"
ONE_EACH = "one sample on each rank"

_THREE = "more than two ranks"
_UNEVEN = "a number of samples that the ranks cannot divide evenly"


def _more_than_two(arguments: Arguments) -> bool:
    return int(arguments["world_size"]) > 2


def _inputs_of_three(arguments: Arguments) -> bool:
    return len(arguments["inputs"]) > 2


def _group(arguments: Arguments) -> bool:
    ranks = arguments["ranks"]
    return ranks is not None and list(ranks) != list(range(len(ranks)))


def _remainder(arguments: Arguments) -> bool:
    return any(one.numel() % len(arguments["inputs"]) for one in arguments["inputs"])


def _no_elements(arguments: Arguments) -> bool:
    return any(not one.numel() for one in arguments["inputs"])


def _shard_sizes(arguments: Arguments) -> list[int]:
    shards = arguments["shards"]
    return [len(shards[rank][0]) for rank in range(len(shards))]  # an iterator, which has ended, raises


def _uneven_samples(arguments: Arguments) -> bool:
    return bool(arguments["num_samples"] % arguments["world_size"])


def _inputs_of_batches(arguments: Arguments) -> list[Tensor]:
    batches = [[batch] if isinstance(batch, Tensor) else batch for batch in arguments["batches"]]
    return [one for batch in batches for one in batch]


def _total_norm(arguments: Arguments) -> float:
    norm_type = float(arguments["norm_type"])
    norms = [
        float(gradient.detach().abs().double().norm(norm_type))
        for gradient in _gradients(arguments)
        if gradient is not None and gradient.numel()
    ]
    if norm_type == float("inf"):
        return max(norms, default=0.0)
    return float(sum(norm**norm_type for norm in norms) ** (1 / norm_type))


def _gradients(arguments: Arguments) -> list[Any]:
    return [gradient for gradients in arguments["gradients"] for gradient in gradients]


def _steps(arguments: Arguments) -> list[int]:
    steps: int | Sequence[int] = arguments["steps"]
    return [steps] if isinstance(steps, int) else list(steps)


_OF_COLLECTIVES: dict[str, Predicate] = {
    _THREE: _inputs_of_three,
    "a number of elements that the ranks cannot divide evenly": _remainder,
    "a tensor without elements": _no_elements,
    "a group of other ranks, or in another order": _group,
}
_OF_SAMPLERS: dict[str, Predicate] = {
    _THREE: _more_than_two,
    _UNEVEN: _uneven_samples,
    "fewer samples than ranks": lambda of: of["num_samples"] < of["world_size"],
}

CONDITIONS: Mapping[str, Mapping[str, Predicate]] = {
    "check_all_gather": _OF_COLLECTIVES,
    "check_all_reduce": _OF_COLLECTIVES,
    "check_broadcast": {
        _THREE: _inputs_of_three,
        "a source other than rank 0": lambda of: of["src"] != 0,
        "a group of other ranks, or in another order": _group,
    },
    "check_clip_grad_norm": {
        "a norm above max_norm": lambda of: _total_norm(of) > of["max_norm"],
        "a norm below max_norm": lambda of: _total_norm(of) < of["max_norm"],
        "a parameter without gradient": lambda of: any(gradient is None for gradient in _gradients(of)),
    },
    "check_comm_hook": {_THREE: _more_than_two, "gradients of half precision": lambda of: _has_half(of["dtypes"])},
    "check_data_parallel": {_THREE: _more_than_two},
    "check_derivative": {_THREE: _more_than_two},
    "check_epoch_loop": {**_OF_SAMPLERS, "more than one epoch": lambda of: of["epochs"] > 1},
    "check_grad_scaler": {
        _THREE: _more_than_two,
        "an overflow on some ranks only": lambda of: any(
            0 < len(ranks) < of["world_size"] for ranks in of["overflows"]
        ),
        "a step without an overflow": lambda of: any(not ranks for ranks in of["overflows"]),
    },
    "check_gradients_equal_single_process": {
        _THREE: lambda of: len(of["shards"]) > 2,
        "ranks with different numbers of samples": lambda of: len(set(_shard_sizes(of))) > 1,
        EMPTY: lambda of: 0 in _shard_sizes(of),
    },
    "check_local_sgd": {
        _THREE: _more_than_two,
        "steps after the last round": lambda of: any(
            steps % of["sync_every"] for steps in _steps(of) if of["sync_every"] is not None
        ),
        "two rounds": lambda of: of["sync_every"] is None or any(s >= 2 * of["sync_every"] for s in _steps(of)),
    },
    "check_metric": {_THREE: lambda of: any(size > 2 for size in of["world_sizes"])},
    "check_pipeline": {
        "more than two stages": _more_than_two,
        "more micro-batches than stages": lambda of: of["n_microbatches"] > of["world_size"],
        "two batches": lambda of: len(of["batches"]) > 1,
    },
    "check_reduce_scatter": {_THREE: _inputs_of_three, "a group of other ranks, or in another order": _group},
    "check_replicas_in_sync": {_THREE: _more_than_two, "more than one step": lambda of: of["steps"] > 1},
    "check_same_trajectory": {_THREE: _more_than_two, "more than one step": lambda of: of["steps"] > 1},
    "check_sampler": {**_OF_SAMPLERS, "more than one epoch": lambda of: of["epochs"] > 1},
    "check_sampler_resumes": {
        "another number of ranks after the stop": lambda of: len(set(of["world_sizes"])) > 1,
        "an epoch after the first": lambda of: of["epoch"] > 0,
        _UNEVEN: lambda of: any(of["num_samples"] % size for size in of["world_sizes"]),
    },
    "check_shards": _OF_SAMPLERS,
    "check_sharded_layer": {
        _THREE: _more_than_two,
        "two batches": lambda of: len(of["batches"]) > 1,
        "an input that is not contiguous": lambda of: any(not one.is_contiguous() for one in _inputs_of_batches(of)),
    },
    "check_world_size_does_not_matter": {
        "a number of ranks that is no power of two": lambda of: any(size & (size - 1) for size in of["world_sizes"])
    },
}

_met: contextvars.ContextVar[dict[str, bool] | None] = contextvars.ContextVar("met", default=None)


def meet(conditions: Mapping[str, bool]) -> None:
    """Report, inside a check, conditions that its run has shown, and whether it has met them."""
    met = _met.get()
    if met is not None:
        for words, is_met in conditions.items():
            met[words] = met.get(words, False) or is_met


@contextmanager
def reporting(check: str, arguments: Arguments) -> Iterator[None]:
    """Report the conditions of a check if the block, which is its run, ends without an error.

    A check that another check calls reports nothing of its own.
    """
    if _met.get() is not None:
        yield
        return
    met: dict[str, bool] = {}
    token = _met.set(met)
    try:
        yield
    finally:
        _met.reset(token)
    for words, holds in CONDITIONS.get(check, {}).items():
        with suppress(Exception):  # an argument of another form, such as an iterator, shows nothing
            met[words] = bool(holds(arguments))
    if met:
        publish(check, met)


def _has_half(dtypes: Sequence[Any]) -> bool:
    return any(dtype.itemsize == 2 for dtype in dtypes)
