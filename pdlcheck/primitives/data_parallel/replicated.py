"""Data parallelism in one process: replicate, scatter, compute in parallel threads, gather."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pdlcheck.primitives.arguments import require_at_least
from pdlcheck.primitives.data_parallel.replicate import replicate, require_replicable
from pdlcheck.primitives.data_parallel.scatter import gather, scatter, split_sizes
from pdlcheck.primitives.data_parallel.workers import RNG, run_workers

__all__ = ["DataParallel"]

Watch = Callable[[int, nn.Module], AbstractContextManager[object]]


class DataParallel(nn.Module):
    """A module whose batches are split over several workers of one process, as in ``torch.nn.DataParallel``.

    Every forward pass has four parts. It copies the parameters to the workers. It cuts the batch into pieces that
    differ by at most one sample. It runs the module on each piece in a separate thread. It concatenates the outputs on
    ``output_device``. In backward, the gradients of all copies are added up in ``module``, in the order of the workers.
    So a loss of the gathered output has the gradient of the whole batch, even if the batch does not divide evenly. The
    optimizer updates ``module``, on the first device.

    A worker is a device, which may repeat: ``devices=["cpu", "cpu"]``. The first worker uses ``module`` itself; values
    that the other workers set in forward are lost. So with BatchNorm each worker normalises its own piece, and the
    running statistics are those of the first worker's pieces, as in torch. Hooks run on every worker, and in other
    threads on all workers except the first. A batch with fewer samples than workers uses fewer workers. A call without
    tensors or without samples uses only the first worker.

    Every tensor is cut and joined along ``dim``, as in torch, even if its samples are along another dimension. An
    example is the hidden state of an ``nn.LSTM``, with its samples along dimension 1. Pass and return such a tensor
    transposed, or let all tensors have their samples along ``dim=1``, as with ``batch_first=False``.

    Differences from torch's wrapper: there are CPU workers. Pieces of 5 samples on 4 workers are 2, 1, 1, 1 (not 2, 2,
    1). Tensors with different numbers of samples are an error (torch drops samples). A parameter that no worker used
    keeps the gradient None (in torch it becomes zeros, and momentum moves it). Attributes that forward sets on the
    first worker stay.

    The keys of ``state_dict`` begin with ``module.``, as in torch.

    Args:
        module: a module on the first device.
        devices: the devices of the workers. ``None`` is every CUDA device, the module's first, if the module is on one.
        workers: number of workers on the device of the module; replaces ``devices``.
        output_device: the device where outputs are joined; ``None`` is the first device.
        dim: the dimension of the samples, in inputs and outputs.
        shared: names of keyword arguments that every worker gets whole.
        rng: the random numbers that workers draw (dropout). ``"device"``: those of their device. CPU workers share one
            generator, and timing decides which worker gets which of its numbers. ``"same"``: all workers draw the same
            numbers. ``"distinct"``: different numbers, the same in every run. With these two, workers on one device
            take turns. Use one of them if workers on one device draw inside ``torch.utils.checkpoint``: it repeats the
            draws of its worker, and other workers must not have drawn in between.

    Raises:
        TypeError: ``module`` is not a module, or cannot be copied: it is compiled, or a wrapper that makes replicas.
        ValueError: there is no worker; devices have different types or do not exist; ``devices`` is given together with
            ``workers``; ``rng`` is unknown; the module is lazy or not on the first device.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> replicated = DataParallel(net, workers=4)
        >>> replicated(torch.ones(6, 2)).sum().backward()
        >>> net.weight.grad.tolist(), replicated.sizes(6)
        ([[6.0, 6.0]], [2, 2, 1, 1])

    Source: "How parallel training works in PyTorch" (2024); D. Gannon (2020); the interface is that of
    ``torch.nn.DataParallel``.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device | str | int] | None = None,
        *,
        workers: int | None = None,
        output_device: torch.device | str | int | None = None,
        dim: int = 0,
        shared: Collection[str] = (),
        rng: Literal["device", "distinct", "same"] = "device",
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"DataParallel takes a torch.nn.Module, got {type(module).__name__}")
        if rng not in RNG:
            raise ValueError(f"DataParallel knows rng {', '.join(map(repr, RNG))}, got {rng!r}")
        if isinstance(shared, str):
            raise TypeError(f"DataParallel takes shared as a list of names, got the string {shared!r}")
        require_replicable(module)
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if is_lazy(tensor):
                raise ValueError(f"DataParallel got {name!r}, which has no shape yet; run one forward pass first")
        self.devices = _devices(module, devices, workers)
        self.output_device = self.devices[0] if output_device is None else _device(output_device)
        self.dim = dim
        self.shared = frozenset(shared)
        self.rng = rng
        self.module = module
        _require_home(module, self.devices[0])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the pieces of the batch, and return the joined outputs."""
        return self.watched(args, kwargs, lambda worker, module: nullcontext())

    def watched(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch) -> Any:
        """Run forward, with each worker's computation inside ``watch(worker, replica)``."""
        _require_home(self.module, self.devices[0])
        calls = scatter(args, kwargs, self.devices, dim=self.dim, shared=self.shared)
        devices = self.devices[: len(calls)]
        replicas = replicate(self.module, devices)

        def call(worker: int) -> Any:
            mine, named = calls[worker]
            with watch(worker, replicas[worker]):
                return replicas[worker](*mine, **named)

        outputs = run_workers([partial(call, worker) for worker in range(len(calls))], devices, rng=self.rng)
        return gather(outputs, self.output_device, dim=self.dim, alone=len(self.devices) == 1)

    def sizes(self, num_samples: int) -> list[int]:
        """Return the number of samples of each worker, for a batch of ``num_samples``.

        If forward returns one loss for each worker, these are their weights: ``(losses * sizes).sum() / num_samples``.
        """
        require_at_least("DataParallel.sizes", "num_samples", num_samples, 0)
        return split_sizes(num_samples, len(self.devices))

    def extra_repr(self) -> str:
        """Return the devices for the module's ``repr``."""
        return f"devices={[str(device) for device in self.devices]}"


def _devices(
    module: nn.Module, devices: Sequence[torch.device | str | int] | None, workers: int | None
) -> tuple[torch.device, ...]:
    home = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), torch.device("cpu"))
    if devices is not None and workers is not None:
        raise ValueError(f"DataParallel takes devices or workers, got devices={list(devices)} and workers={workers}")
    if workers is not None:
        require_at_least("DataParallel", "workers", workers, 1)
        return (home,) * workers
    if devices is None:
        others = range(torch.cuda.device_count()) if home.type == "cuda" else ()
        return (home, *(torch.device("cuda", index) for index in others if index != home.index))
    if isinstance(devices, str | torch.device | int):
        raise TypeError(f"DataParallel takes devices as a list, got {devices!r}; pass [{devices!r}]")
    chosen = tuple(_device(device) for device in devices)
    if not chosen:
        raise ValueError("DataParallel needs a worker, got devices=[]; None takes all that there are")
    if len({device.type for device in chosen}) > 1:
        raise ValueError(f"DataParallel needs devices of one type, got {[str(device) for device in chosen]}")
    return chosen


def _device(device: torch.device | str | int) -> torch.device:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type == "cuda":
        count = torch.cuda.device_count()
        index = found.index if found.index is not None else torch.cuda.current_device() if count else 0
        if index >= count:
            raise ValueError(f"DataParallel got device {found}, this process sees {count} CUDA device(s)")
        return torch.device("cuda", index)
    raise ValueError(f"DataParallel knows workers on cpu and cuda, got device {found}")


def _require_home(module: nn.Module, home: torch.device) -> None:
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != home:
            raise ValueError(
                f"DataParallel needs its module on the first device, {home}; {name!r} is on {tensor.device}; "
                f"call module.to({str(home)!r})"
            )
