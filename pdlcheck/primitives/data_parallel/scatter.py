"""A batch is cut into one piece for each worker, and their outputs are put together again."""

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
    """Samples of each worker: they differ by at most one, and a worker without samples is not in the list.

    A batch of no samples is one piece.

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
    """The arguments of each worker that has samples, on its device.

    Tensors, at any depth, are cut along ``dim``; gradients flow back through the cut. Tensors without dimensions, those
    in arguments named in ``shared``, and all that is no tensor go to every worker whole. A worker gets copies: what
    its forward writes into them is not seen by the caller or by other workers. (Where there is one piece only, it is
    the caller's own.)

    Args:
        args, kwargs: of one call of the module.
        devices: of the workers.
        dim: of the samples.
        shared: names of keyword arguments that are not cut.

    Returns:
        ``(args, kwargs)`` for each worker; of one worker where nothing is to be cut.

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
    """What the workers returned, as one structure on ``device``: tensors are concatenated along ``dim``.

    Tensors without dimensions become a vector, one element for each worker that had samples, also where one had all.
    What is no tensor must be equal on all workers.

    Args:
        outputs: of the workers that had samples.
        device: where they are put together.
        dim: of the samples.
        alone: there is one worker for batches of any size, whose output is passed on as it is.

    Raises:
        ValueError: shapes differ in another dimension than ``dim``, or structures differ.
        TypeError: values that are no tensors differ, or cannot be compared.

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
