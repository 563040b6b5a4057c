"""Optimizer states, gradients or parameters spread over ranks: ZeRO, FSDP1, FSDP2, HSDP."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .entry import WORLD_SIZE, Feature
from .models import (
    STEPS,
    full,
    make_adam,
    make_model,
    make_sgd,
    mesh,
    plain,
    shard,
    train,
    trained_alone,
    trained_alone_with_adam,
)


def zero_redundancy(**options):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = make_model()
    wrapped = DistributedDataParallel(model)
    train(wrapped, ZeroRedundancyOptimizer(model.parameters(), **options))
    return plain(model)


def zero_with_join():
    """Train with even inputs.

    With uneven inputs torch uses the last gradient of an ended rank to step that rank's shards.
    """
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), **SGD)
    with Join([wrapped, optimizer]):
        train(wrapped, optimizer)
    return plain(model)


SGD = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
ADAM = {"optimizer_class": torch.optim.Adam, "lr": 0.01}


def shard_layers(*shape: int, **options):
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    where = mesh(*shape)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=where, **options)
    return fully_shard(model, mesh=where, **options)


def fsdp2(*shape: int, make_optimizer=make_sgd, **options):
    model = shard_layers(*shape, **options)
    train(model, make_optimizer(model.parameters()))
    return full(model)


def fsdp2_with_accumulation():
    model = shard_layers(WORLD_SIZE)
    optimizer = make_sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for is_last, part in enumerate(shard(step).chunk(2)):
            model.set_requires_gradient_sync(bool(is_last))
            (model(part).square().mean() / 2).backward()
        optimizer.step()
    return full(model)


def fsdp1(strategy, *shape: int, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    if shape:
        options["device_mesh"] = mesh(*shape)
    model = FullyShardedDataParallel(
        make_model(), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy[strategy], **options
    )
    train(model, make_sgd(model.parameters()))
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


FEATURES = [
    Feature("ZeRO", partial(zero_redundancy, **SGD), trained_alone),
    Feature("ZeRO, Adam", partial(zero_redundancy, **ADAM), trained_alone_with_adam),
    Feature(
        "ZeRO, parameters_as_bucket_view",
        partial(zero_redundancy, parameters_as_bucket_view=True, **SGD),
        trained_alone,
    ),
    Feature("ZeRO and DDP, Join", zero_with_join, trained_alone),
    Feature("FSDP1, FULL_SHARD", partial(fsdp1, "FULL_SHARD"), trained_alone),
    Feature("FSDP1, SHARD_GRAD_OP", partial(fsdp1, "SHARD_GRAD_OP"), trained_alone),
    Feature("FSDP1, use_orig_params", partial(fsdp1, "FULL_SHARD", use_orig_params=True), trained_alone),
    Feature("FSDP1, HYBRID_SHARD (HSDP)", partial(fsdp1, "HYBRID_SHARD", 2, 2), trained_alone),
    Feature("FSDP2", partial(fsdp2, WORLD_SIZE), trained_alone),
    Feature("FSDP2, Adam", partial(fsdp2, WORLD_SIZE, make_optimizer=make_adam), trained_alone_with_adam),
    Feature(
        "FSDP2, reshard_after_forward=False", partial(fsdp2, WORLD_SIZE, reshard_after_forward=False), trained_alone
    ),
    Feature("FSDP2, set_requires_gradient_sync", fsdp2_with_accumulation, trained_alone),
    Feature("FSDP2 on a 2 x 2 mesh (HSDP)", partial(fsdp2, 2, 2), trained_alone),
]
