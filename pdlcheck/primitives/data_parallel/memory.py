"""The memory that each worker of DataParallel holds; the first one holds more than the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.primitives.data_parallel.replicated import DataParallel
from pdlcheck.primitives.storage_bytes import KeptBytes, nbytes_of

__all__ = ["WorkerMemory", "memory_by_worker"]


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that one worker holds in a training step.

    Args:
        worker: the number of the worker; the device of worker 0 holds the module.
        device: the device of the worker.
        parameters: parameters and buffers, of the module or of the copy.
        gradients: gradients of the parameters, as backward made them.
        activations: tensors that forward kept for backward, except parameters. The first worker includes the tensors
            kept for joining the outputs and for the loss.
        peak: highest number of bytes allocated on the device in the step, as torch counts on CUDA; None on other
            devices. Workers on the same device share it.
    """

    worker: int
    device: str
    parameters: int
    gradients: int
    activations: int
    peak: int | None

    @property
    def total(self) -> int:
        """Return the sum of parameters, gradients and activations."""
        return self.parameters + self.gradients + self.activations


def memory_by_worker(
    replicated: DataParallel, loss: Callable[[Any], Tensor], *args: Any, **kwargs: Any
) -> list[WorkerMemory]:
    """Take one forward and one backward pass, and measure the memory that each worker holds.

    Memory that several tensors share counts once. The first worker's device also holds the outputs of all workers, the
    loss, and the state of the optimizer. The optimizer's state is not counted here: twice the parameters for Adam.

    Args:
        replicated: the wrapper to measure; gradients of its module are set to None before and after.
        loss: a function of the gathered output; must return a scalar.
        *args: the batch, as positional arguments of the module.
        **kwargs: the batch, as keyword arguments of the module.

    Returns:
        One entry for each worker that had samples.

    Raises:
        TypeError: ``replicated`` is not pdlcheck's DataParallel.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        >>> first, other = memory_by_worker(DataParallel(net, workers=2), lambda y: y.square().mean(), torch.ones(8, 4))
        >>> first.parameters == other.parameters, first.activations - other.activations
        (True, 128)

    The 128 bytes are the gathered output, 8 samples of 4 numbers, which ``square`` keeps for backward.

    Source: "How parallel training works in PyTorch" (2024); "Quick primer on distributed training" (2020).
    """
    if not isinstance(replicated, DataParallel):
        raise TypeError(f"memory_by_worker takes a DataParallel of pdlcheck, got {type(replicated).__name__}")
    module, devices = replicated.module, replicated.devices
    module.zero_grad(set_to_none=True)
    on_cuda = sorted({device for device in devices if device.type == "cuda"}, key=str)
    for device in on_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    counts = [_Count() for _ in devices]

    def watch(worker: int, replica: nn.Module) -> AbstractContextManager[object]:
        counts[worker].look_at(replica)
        return counts[worker].saved()

    with counts[0].saved():
        loss(replicated.watched(args, kwargs, watch)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for device in on_cuda:
        torch.cuda.synchronize(device)
    counts[0].gradients = sum(nbytes_of(p.grad) for p in module.parameters() if p.grad is not None)
    module.zero_grad(set_to_none=True)
    return [
        WorkerMemory(
            worker,
            str(device),
            parameters=count.parameters.nbytes,
            gradients=count.gradients,
            activations=count.kept.nbytes,
            peak=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        )
        for worker, (device, count) in enumerate(zip(devices, counts, strict=True))
        if count.called
    ]


class _Count:
    """The bytes of one worker, counted while it computes."""

    def __init__(self) -> None:
        self.called = False
        self.parameters = KeptBytes()
        self.kept = KeptBytes(but=self.parameters)
        self.gradients = 0

    def look_at(self, replica: nn.Module) -> None:
        self.called = True
        for tensor in chain(replica.parameters(), replica.buffers()):
            self.parameters.add(tensor)
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._add)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @contextmanager
    def saved(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def _keep(self, tensor: Tensor) -> Tensor:
        self.kept.add(tensor)
        return tensor

    def _add(self, grad: Tensor) -> None:
        self.gradients += nbytes_of(grad)
