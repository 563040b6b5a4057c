"""Two ways to train a model on replicas. Call them on every rank; the replicas are equal afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.primitives.agreement import require_agreement
from pdlcheck.primitives.arguments import (
    Members,
    members,
    named_state,
    require_at_least,
    require_int,
    require_state,
    require_writable,
)
from pdlcheck.primitives.data import shard_indices
from pdlcheck.primitives.local_sgd import LocalSGD
from pdlcheck.primitives.optimizer_state import hyper_parameters
from pdlcheck.primitives.sync import broadcast_parameters, sync_gradients, sync_shares

__all__ = ["train_local_sgd", "train_synchronous"]

LEAST = {"epochs": 0, "global_batch": 1, "sync_every": 1}
Seen = list[tuple[Tensor, int]]  # the mean loss of a batch, and the samples in it


def train_synchronous(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    data: tuple[Tensor, Tensor],
    *,
    optimizer: Callable[..., Optimizer],
    epochs: int,
    global_batch: int,
    shuffle: bool = True,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """Train with synchronous SGD: all ranks take the same step, with the gradient of the whole batch.

    A batch of ``global_batch`` samples is split over the ranks, and each rank's gradient is weighted with its number of
    samples. So any number of ranks takes the steps of one process, up to round-off, even if a batch does not divide
    evenly. This does not hold with BatchNorm or dropout, because a sample's gradient then depends on the other samples
    of its rank.

    Args:
        model: training starts with rank 0's weights; equal on every rank, bit for bit, afterwards.
        loss: mean over the samples, of ``(model(inputs), targets)``.
        data: inputs and targets, all of them on every rank; each rank reads only its part.
        optimizer: makes the optimizer from the parameters: ``functools.partial(torch.optim.SGD, lr=0.1)``.
        epochs: how often every sample is used; 0 only makes the replicas equal.
        global_batch: samples in a step, over all ranks; the last batch of an epoch may be smaller.
        shuffle: whether every epoch has another order.
        seed: the seed of that order; same on every rank.
        group: process group; ``None`` is the default group. The weights come from its first rank.

    Returns:
        The mean loss in every epoch, before each step, over all samples; the same list on every rank.

    Raises:
        ValueError: on every rank alike: there are no samples, or inputs and targets differ in length; ``global_batch``
            is below 1 or ``epochs`` below 0; the model is empty; arguments, optimizers or numbers of samples differ
            between ranks; a gradient is sparse.

    Example:
        >>> import functools
        >>> sgd = functools.partial(torch.optim.SGD, lr=0.1)
        >>> data = torch.ones(6, 1), torch.ones(6, 1)
        >>> def train():
        ...     model = nn.Linear(1, 1)
        ...     nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        ...     return train_synchronous(model, nn.MSELoss(), data, optimizer=sgd, epochs=2, global_batch=6)
        >>> [[round(loss, 4) for loss in losses] for losses in world.run(train, world_size=2)]
        [[1.0, 0.36], [1.0, 0.36]]

    Source: "Distributed training with PyTorch and MPI" (2018); D. Gannon (2020).
    """
    settings = {"epochs": epochs, "global_batch": global_batch, "shuffle": shuffle, "seed": seed}
    who = _start("train_synchronous", model, data, settings, group)
    parameters: list[Tensor] = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    steps, is_checked = optimizer(parameters), False
    losses = []
    for epoch in range(epochs):
        seen: Seen = []
        for batch in _batches(len(data[0]), global_batch, epoch, shuffle, seed):
            mine = batch.tensor_split(who.world_size)[who.rank]
            steps.zero_grad()
            _backward(model, loss, data, mine, seen)
            if is_checked:  # arguments that are right in the first step are right in all steps
                sync_shares(trained, float(len(mine)), group=group)
            else:
                _require_first_step(parameters, steps, who)
                is_checked = sync_gradients(parameters, weight=len(mine), group=group)
            steps.step()
        losses.append(_mean_loss(seen, data, group))
    return losses


def train_local_sgd(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    data: tuple[Tensor, Tensor],
    *,
    optimizer: Callable[..., Optimizer],
    epochs: int,
    global_batch: int,
    sync_every: int,
    momentum: Literal["average", "keep", "reset"] = "keep",
    buffers: Literal["average", "broadcast", "keep"] = "broadcast",
    shuffle: bool = True,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """Train with local SGD: ranks step with their own gradients, and average their models after every k-th step.

    They average once more at the end. With ``sync_every=1`` and batches that split evenly, the steps are those of
    :func:`train_synchronous` for SGD with or without momentum, because both are linear in the gradient. They differ for
    Adam. The steps are those of :class:`LocalSGD`.

    Args:
        sync_every: steps between two averages; the last average always comes after the last step.
        momentum: the policy for momentum in an average, as in :class:`LocalSGD`.
        buffers: the policy for buffers in an average, as in :class:`LocalSGD`.
        model: as in :func:`train_synchronous`.
        loss: as in :func:`train_synchronous`.
        data: as in :func:`train_synchronous`.
        optimizer: as in :func:`train_synchronous`.
        epochs: as in :func:`train_synchronous`.
        global_batch: as in :func:`train_synchronous`. A rank whose part of a batch is empty does not step.
        shuffle: as in :func:`train_synchronous`.
        seed: as in :func:`train_synchronous`.
        group: as in :func:`train_synchronous`.

    Returns:
        The mean loss in every epoch, before each step, over all samples, each under the model of its rank; the same
        list on every rank.

    Raises:
        ValueError: as in :func:`train_synchronous`; also if ``sync_every`` is below 1.

    Example:
        >>> import functools
        >>> sgd = functools.partial(torch.optim.SGD, lr=0.1)
        >>> data, mse = (torch.ones(6, 1), torch.ones(6, 1)), nn.MSELoss()
        >>> def train():
        ...     net = nn.Linear(1, 1)
        ...     train_local_sgd(net, mse, data, optimizer=sgd, epochs=4, global_batch=2, sync_every=2)
        ...     return net.weight.item()
        >>> len(set(world.run(train, world_size=2)))
        1

    Source: models averaged every 200 epochs in D. Gannon (2020); S. Stich, "Local SGD converges fast and communicates
    little", ICLR (2019).
    """
    settings = {"epochs": epochs, "global_batch": global_batch, "shuffle": shuffle, "seed": seed}
    who = _start("train_local_sgd", model, data, settings | {"sync_every": sync_every}, group)
    local = LocalSGD(
        optimizer(model.parameters()), model, sync_every=sync_every, momentum=momentum, buffers=buffers, group=group
    )
    losses = []
    for epoch in range(epochs):
        seen: Seen = []
        for batch in _batches(len(data[0]), global_batch, epoch, shuffle, seed):
            mine = batch.tensor_split(who.world_size)[who.rank]
            local.zero_grad()
            has_stepped = _backward(model, loss, data, mine, seen)
            local.step(local.optimizer.step if has_stepped else _no_step)
        losses.append(_mean_loss(seen, data, group))
    local.finish()
    return losses


def _start(
    caller: str,
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    settings: Mapping[str, int],
    group: dist.ProcessGroup | None,
) -> Members:
    who = members(caller, group)

    def facts() -> dict[str, object]:
        for name, least in LEAST.items():
            if name in settings:
                require_at_least(caller, name, settings[name], least)
        require_int(caller, "seed", settings["seed"])
        _require_tensors(caller, data)
        inputs, targets = data
        if len(inputs) != len(targets) or not len(inputs):
            raise ValueError(
                f"{caller} needs a target for every input, got {len(inputs)} inputs and {len(targets)} targets"
            )
        parameters, buffers = named_state(caller, model)
        require_state(caller, {**parameters, **buffers}, group)
        require_writable(caller, {**parameters, **buffers})
        return {**settings, "number of samples": len(inputs)}

    require_agreement(caller, who, facts)
    broadcast_parameters(model, src=who.at(0), group=group)
    return who


def _require_tensors(caller: str, data: object) -> None:
    kinds = [type(part).__name__ for part in data] if isinstance(data, tuple | list) else [type(data).__name__]
    if not (len(kinds) == 2 and isinstance(data, tuple | list) and all(isinstance(part, Tensor) for part in data)):
        raise TypeError(
            f"{caller} takes data as two tensors, inputs and targets, got {', '.join(kinds)}; torch.as_tensor makes one"
        )
    if not all(part.dim() for part in data):
        raise ValueError(f"{caller} needs a sample in each row of inputs and targets, got a tensor without dimensions")


def _require_first_step(parameters: list[Tensor], optimizer: Optimizer, who: Members) -> None:
    """Raise on every rank if the gradients of one rank are wrong, also on a rank without samples."""

    def facts() -> dict[str, object]:
        sync_gradients(parameters, sync_every=None, group=who.group)  # checks only, and sends nothing
        return hyper_parameters(optimizer)

    require_agreement("train_synchronous", who, facts)


def _batches(num_samples: int, global_batch: int, epoch: int, shuffle: bool, seed: int) -> Iterator[Tensor]:
    """Return the batches of an epoch, the same on every rank."""
    order = shard_indices(num_samples, rank=0, world_size=1, epoch=epoch, shuffle=shuffle, seed=seed)
    return iter(torch.split(order, global_batch))


def _backward(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    data: tuple[Tensor, Tensor],
    mine: Tensor,
    seen: Seen,
) -> bool:
    """Compute the gradients of this rank's part of the batch. Return False if the part is empty.

    The mean loss of an empty part is NaN, so nothing is computed.
    """
    if not len(mine):
        return False
    value = loss(model(data[0].index_select(0, mine)), data[1].index_select(0, mine))
    value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    seen.append((value.detach(), len(mine)))  # stays on its device, so that no code waits for the value
    return True


def _no_step() -> None:
    """Take no step, on a rank whose part of a batch is empty."""


def _mean_loss(seen: Seen, data: tuple[Tensor, Tensor], group: dist.ProcessGroup | None) -> float:
    """Return the mean loss over all samples of all ranks."""
    total = torch.zeros(2, dtype=torch.float64, device=data[0].device)
    if seen:
        values = torch.stack([value for value, _ in seen]).to(total.dtype)
        counts = torch.tensor([count for _, count in seen], dtype=total.dtype, device=total.device)
        total = torch.stack([values.dot(counts), counts.sum()])
    dist.all_reduce(total, group=group)
    return float(total[0] / total[1])
