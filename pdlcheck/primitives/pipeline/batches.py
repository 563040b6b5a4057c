"""The split of a batch into micro-batches, and the union of their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["concatenated", "counted", "micro_batches", "moved", "packed_as", "require_batch", "samples_in"]


def samples_in(caller: str, argument: str, batch: Any) -> int:
    """Return the number of samples: the first dimension of a tensor, or of each tensor of a tuple.

    Raises:
        TypeError: something other than tensors.
        ValueError: tensors without dimensions, or of different lengths.
    """
    tensors = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{caller} takes {argument} as a tensor or a tuple of tensors, got {type(tensor).__name__}")
        if not tensor.dim():
            raise ValueError(f"{caller} splits the first dimension of {argument}, got a tensor without dimensions")
    lengths = [len(tensor) for tensor in tensors]
    if not lengths or len(set(lengths)) > 1:
        raise ValueError(f"{caller} needs as many samples in every tensor of {argument}, got {lengths}")
    return lengths[0]


def counted(loss: object, targets: Any) -> float:
    """Return the divisor of the mean that ``loss`` takes, up to a factor that is the same for all micro-batches.

    The divisor is the number of samples. For torch's losses with class targets, it is the number of targets that are
    not ignored, each times the weight of its class.
    """
    samples = samples_in("Pipeline", "targets", targets)
    if type(loss) not in (nn.CrossEntropyLoss, nn.NLLLoss) or not isinstance(targets, Tensor):
        return samples
    assert isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    if targets.is_floating_point():  # class probabilities are never ignored
        return samples
    classes = targets[targets != loss.ignore_index]
    if loss.weight is None:
        return classes.numel()
    known = classes.numel() and not (int(classes.min()) < 0 or int(classes.max()) >= len(loss.weight))
    # The loss itself raises for a class that it does not have.
    return float(loss.weight.to(classes.device)[classes].double().sum()) if known else classes.numel()


def require_batch(argument: str, batch: Any, n_microbatches: int) -> int:
    """Return the number of samples in ``batch``; raise unless there is at least one for each micro-batch."""
    if batch is None:
        raise ValueError(f"Pipeline needs {argument} on the rank that reads them, got None")
    found = samples_in("Pipeline", argument, batch)
    if found < n_microbatches:
        raise ValueError(
            f"Pipeline got {argument} of {found} samples for n_microbatches={n_microbatches}; "
            "give it a larger batch, or make it with fewer micro-batches"
        )
    return found


def micro_batches(batch: Any, n_microbatches: int) -> list[Any]:
    """Return ``n_microbatches`` parts in order. If the batch does not divide, the first ones have one sample more."""
    if isinstance(batch, Tensor):
        return list(batch.tensor_split(n_microbatches))
    return [packed_as(batch, parts) for parts in zip(*(one.tensor_split(n_microbatches) for one in batch), strict=True)]


def packed_as(value: Any, parts: Sequence[Any]) -> Any:
    """Return ``parts`` in a tuple or list of the type of ``value``, which may be a named tuple."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def concatenated(parts: Mapping[int, Any]) -> Any:
    """Return the outputs of micro-batches in order, joined along the first dimension: tensors, or tuples of tensors."""
    values = [parts[microbatch] for microbatch in sorted(parts)]
    if isinstance(values[0], Tensor):
        # Outputs such as a loss of the micro-batch have no dimension, so they are stacked.
        return torch.cat(values) if values[0].dim() else torch.stack(values)
    return packed_as(values[0], [concatenated(dict(enumerate(column))) for column in zip(*values, strict=True)])


def moved(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``."""
    if isinstance(value, Tensor):
        # A non-blocking copy to the CPU may be read too early.
        return value.to(device, non_blocking=device.type != "cpu")
    return packed_as(value, [moved(one, device) for one in value]) if isinstance(value, tuple | list) else value
