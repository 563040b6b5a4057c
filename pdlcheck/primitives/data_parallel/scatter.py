"""The split of a batch into one piece for each worker, and the union of the workers' outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pdlcheck.primitives.data_parallel.nested import map_nested

__all__ = ["gather", "scatter", "split_sizes"]

PLAIN = (bool, int, float, complex, str, bytes)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def split_sizes(num_samples: int, workers: int) -> list[int]:
    """Return the number of samples of each worker. They differ by at most one; workers without samples are left out.

    A batch without samples is one piece.

    Example:
        >>> split_sizes(64, 4), split_sizes(5, 4), split_sizes(2, 4), split_sizes(0, 4)
        ([16, 16, 16, 16], [2, 1, 1, 1], [1, 1], [0])
    """
    used = max(1, min(num_samples, workers))
    share, rest = divmod(num_samples, used)
    return [share + (worker < rest) for worker in range(used)]


def scatter(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    devices: Sequence[torch.device],
    *,
    dim: int = 0,
    shared: Collection[str] = (),
) -> list[Call]:
    """Return the arguments of each worker that has samples, on its device.

    Tensors, at any depth, are cut along ``dim``, and gradients flow back through the cut. Three kinds of values go to
    every worker whole: tensors without dimensions, tensors in arguments named in ``shared``, and values that are not
    tensors. A worker gets copies: values that its forward writes into them reach neither the caller nor other workers.
    (If there is only one piece, it is the caller's own.)

    Args:
        args: positional arguments of one call of the module.
        kwargs: keyword arguments of the same call.
        devices: the devices of the workers.
        dim: the dimension of the samples.
        shared: names of keyword arguments that are not cut.

    Returns:
        ``(args, kwargs)`` for each worker; of one worker if there is nothing to cut.

    Raises:
        ValueError: tensors have different numbers of samples, or no dimension ``dim``.
        TypeError: a packed sequence.

    Example:
        >>> cpu = torch.device("cpu")
        >>> for args, kwargs in scatter((torch.arange(3), "x"), {"scale": 2}, [cpu, cpu]):
        ...     print(args, kwargs)
        (tensor([0, 1]), 'x') {'scale': 2}
        (tensor([2]), 'x') {'scale': 2}
    """
    cut = {name: value for name, value in kwargs.items() if name not in shared}
    whole = {name: value for name, value in kwargs.items() if name in shared}
    found: dict[str, int] = {}

    def look(values: list[Any], path: str) -> None:
        tensor = values[0]
        if isinstance(tensor, Tensor) and tensor.dim():
            if not -tensor.dim() <= dim < tensor.dim():
                raise ValueError(f"DataParallel cuts along dim={dim}, {path} has shape {tuple(tensor.shape)}")
            found[path] = tensor.shape[dim]

    map_nested(look, [args], "args")
    map_nested(look, [cut], "kwargs")
    if len(set(found.values())) > 1:
        texts = ", ".join(f"{path} {size}" for path, size in found.items())
        raise ValueError(
            f"DataParallel needs as many samples in every tensor along dim={dim}, got {texts}; "
            "name keyword arguments that every worker needs whole: DataParallel(..., shared=['mask'])"
        )
    sizes = split_sizes(next(iter(found.values())), len(devices)) if found else [0]
    calls: list[Call] = []
    for worker, size in enumerate(sizes):
        start = sum(sizes[:worker])
        device, alone = devices[worker], len(sizes) == 1

        def piece(
            values: list[Any],
            path: str,
            start: int = start,
            size: int = size,
            device: torch.device = device,
            alone: bool = alone,
        ) -> Any:
            tensor = values[0]
            if not isinstance(tensor, Tensor):
                return tensor
            if tensor.dim() and not alone and path in found:
                tensor = tensor.narrow(dim, start, size)
            return tensor.to(device, non_blocking=True, copy=not alone)

        mine = map_nested(piece, [cut], "kwargs") | map_nested(piece, [whole], "shared")
        calls.append((map_nested(piece, [args], "args"), {name: mine[name] for name in kwargs}))
    return calls


def gather(outputs: Sequence[Any], device: torch.device, *, dim: int = 0, alone: bool = False) -> Any:
    """Return the workers' outputs as one structure on ``device``, with tensors concatenated along ``dim``.

    Tensors without dimensions become a vector with one element for each worker that had samples, even if only one
    worker had samples. Values that are not tensors must be equal on all workers.

    Args:
        outputs: the outputs of the workers that had samples.
        device: the device where they are joined.
        dim: the dimension of the samples.
        alone: whether there is only one worker for batches of any size; its output is passed on unchanged.

    Raises:
        ValueError: shapes differ in a dimension other than ``dim``, or structures differ.
        TypeError: values that are not tensors differ, or cannot be compared.

    Example:
        >>> gather([(torch.zeros(2), 1), (torch.ones(1), 1)], torch.device("cpu"))
        (tensor([0., 0., 1.]), 1)
    """

    def passed_on(values: list[Any], path: str) -> Any:
        value = values[0]
        if not isinstance(value, Tensor):
            return value
        return value.to(device) if alone or value.dim() else value.to(device).unsqueeze(0)

    if len(outputs) == 1:
        return map_nested(passed_on, outputs, "output")

    def join(values: list[Any], path: str) -> Any:
        if all(isinstance(value, Tensor) for value in values):
            return _joined(values, path, device, dim)
        first = values[0]
        if all(value is first for value in values):
            return first
        if all(type(value) is type(first) and isinstance(value, PLAIN) and value == first for value in values):
            return first
        texts = ", ".join(
            f"{value!r} on worker {i}" if isinstance(value, PLAIN) else f"{type(value).__name__} on worker {i}"
            for i, value in enumerate(values)
        )
        raise TypeError(
            f"DataParallel cannot put {path} together: {texts}; return tensors, with the samples along dim={dim}"
        )

    return map_nested(join, outputs, "output")


def _joined(tensors: list[Tensor], path: str, device: torch.device, dim: int) -> Tensor:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if not any(shapes):
        return torch.stack([tensor.to(device, non_blocking=True) for tensor in tensors])
    axis = dim % max(len(shapes[0]), 1)
    others = [(len(shape), *shape[:axis], *shape[axis + 1 :]) for shape in shapes]
    if len(set(others)) > 1:
        texts = ", ".join(f"{shape} on worker {i}" for i, shape in enumerate(shapes))
        raise ValueError(
            f"DataParallel cannot concatenate {path} along dim={dim}: it has shape {texts}; "
            "return it with its samples there, and padded to a length that does not depend on them"
        )
    return torch.cat([tensor.to(device, non_blocking=True) for tensor in tensors], dim)
