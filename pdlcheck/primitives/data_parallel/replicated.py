"""Data parallel in one process: replicate, scatter, apply side by side, gather."""

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
    """A module whose batches are cut and computed by several workers of one process, as ``torch.nn.DataParallel``.

    Every forward copies the parameters to the workers, cuts the batch into pieces that differ by at most one sample,
    runs the module on each piece in a thread of its own, and concatenates the outputs on ``output_device``. In backward
    the gradients of all copies are added up in ``module``, in the order of the workers: a loss of the gathered output
    has the gradient of the whole batch, also where the batch does not divide evenly. The optimizer updates
    ``module``, on the first device.

    A worker is a device, which may repeat: ``devices=["cpu", "cpu"]``. The first worker uses ``module`` itself; what
    the others set in forward is lost. So with BatchNorm each worker normalises its own piece, and the running
    statistics are those of the first worker's pieces, as with torch's. Hooks run on every worker, all but the first's
    in other threads. A batch with fewer samples than workers uses fewer workers; a call without tensors, or of no
    samples, uses the first alone.

    What has its samples elsewhere than along ``dim``, as the hidden state of an ``nn.LSTM`` has along dimension 1, is
    cut and put together along ``dim`` all the same, as by torch's: give and return it transposed, or let all tensors
    have their samples along ``dim=1``, as with ``batch_first=False``.

    Otherwise than torch's: CPU workers; pieces of 5 samples on 4 workers are 2, 1, 1, 1 (not 2, 2, 1); tensors with
    different numbers of samples are an error (there, samples are dropped); a parameter that no worker used keeps the
    gradient None (there, it becomes zeros, and momentum moves it); attributes that forward sets on the first worker
    stay.

    The keys of ``state_dict`` begin with ``module.``, as those of torch's.

    Args:
        module: on the first device.
        devices: of the workers. ``None`` is every CUDA device, the module's first, if the module is on one.
        workers: instead of ``devices``: so many workers on the device of the module.
        output_device: where outputs are put together; ``None`` is the first device.
        dim: of the samples, in inputs and outputs.
        shared: names of keyword arguments that every worker gets whole.
        rng: which random numbers workers draw (dropout): ``"device"``, those of their device; CPU workers share one
            generator, and which of its numbers a worker gets depends on timing. ``"same"``: all workers draw the same
            numbers. ``"distinct"``: different ones, the same in every run. With these two, workers on one device take
            turns. One of them is needed where workers on one device draw inside ``torch.utils.checkpoint``: it draws
            again what its worker drew, and others must not have drawn in between.

    Raises:
        TypeError: ``module`` is no module, or one that cannot be copied: compiled, or a wrapper that makes replicas.
        ValueError: no worker; devices of different types or that are not there; ``devices`` beside ``workers``;
            unknown ``rng``; a lazy module; a module that is not on the first device.

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
        return self.watched(args, kwargs, lambda worker, module: nullcontext())

    def watched(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch) -> Any:
        """Forward, with each worker's computation inside ``watch(worker, replica)``."""
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
        """Samples of each worker, for a batch of ``num_samples``.

        The weights of the losses, where forward returns one for each worker: ``(losses * sizes).sum() / num_samples``.
        """
        require_at_least("DataParallel.sizes", "num_samples", num_samples, 0)
        return split_sizes(num_samples, len(self.devices))

    def extra_repr(self) -> str:
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
