"""Tensors spread over a mesh: DTensor and tensor parallel."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Partial, Shard

from ..parity import functional
from .entry import WORLD_SIZE, Feature, everywhere
from .models import batch, make_model, make_sgd, mesh, plain, train, trained_alone

RANKS = range(WORLD_SIZE)


def placements():
    whole = torch.arange(32.0).view(8, 4)
    parts = zip(whole.chunk(4), whole.chunk(4, dim=1), strict=True)
    return [(rows.tolist(), columns.tolist(), whole.tolist()) for rows, columns in parts]


def uneven_shards():
    whole = torch.arange(12.0).view(6, 2)
    rows = [*whole.chunk(4), whole[:0]]  # the last rank has none
    return [(mine.tolist(), whole.tolist(), str((Shard(0),))) for mine in rows]


def partial_sums():
    total = sum(torch.arange(4.0) + rank for rank in RANKS)
    return [(total[rank : rank + 1].tolist(), total.tolist()) for rank in RANKS]


def product():
    a = torch.arange(16.0).view(4, 4)
    return everywhere((str((Partial(),)), (a @ a).tolist()))


def two_dimensions():
    x = torch.arange(16.0).view(4, 4)
    blocks = [block for rows in x.chunk(2) for block in rows.chunk(2, dim=1)]
    return [(block.tolist(), x.sum(0).tolist()) for block in blocks]


def gradient():
    return everywhere((str((Shard(0),)), torch.arange(8.0).tolist()))


# -- tensor parallel -------------------------------------------------------------------------------


def whole(model):
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def _plan():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"0": ColwiseParallel(), "2": RowwiseParallel()}


def tensor_parallel():
    from torch.distributed.tensor.parallel import parallelize_module

    model = parallelize_module(make_model(), mesh(WORLD_SIZE), _plan())
    train(model, make_sgd(model.parameters()), batch)
    return whole(model)


def tensor_and_data_parallel():
    """Train with tensor parallel in pairs, and FSDP2 over the pairs."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    where = mesh(2, 2)
    model = parallelize_module(make_model(), where["shard"], _plan())
    fully_shard(model, mesh=where["replicate"])
    half = where.get_local_rank("replicate")
    train(model, make_sgd(model.parameters()), lambda step: batch(step).chunk(2)[half])
    return whole(model)


def make_model_with_norm():
    torch.manual_seed(0)
    layers = [nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4)]
    return nn.Sequential(*layers).double()


def sequence_parallel():
    """Train with the rows as the sequence; each norm sees a share of it."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(output_layouts=Shard(0)),
        "4": SequenceParallel(sequence_dim=0, use_local_output=False),
    }
    model = parallelize_module(make_model_with_norm(), mesh(WORLD_SIZE), plan)
    optimizer = make_sgd(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        rows = functional.distribute_tensor(batch(step), model[0].weight.device_mesh, [Shard(0)])
        (model(rows).full_tensor() ** 3).mean().backward()
        optimizer.step()
    return whole(model)


def sequence_parallel_alone():
    model = make_model_with_norm()
    optimizer = make_sgd(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        (model(batch(step)) ** 3).mean().backward()
        optimizer.step()
    return everywhere(plain(model))


FEATURES = [
    Feature("DTensor, redistribute", functional.dtensor_from_one_to_another_placement, placements),
    Feature("DTensor, uneven shards", functional.dtensor_of_uneven_shards, uneven_shards),
    Feature("DTensor, partial sums", functional.dtensor_of_partial_sums, partial_sums),
    Feature("DTensor, product of matrices", functional.dtensor_product_of_matrices, product),
    Feature("DTensor on a 2 x 2 mesh", functional.dtensor_on_two_dimensions, two_dimensions),
    Feature("DTensor, gradient", functional.dtensor_with_a_gradient, gradient),
    Feature("tensor parallel, column-wise, row-wise", tensor_parallel, trained_alone),
    Feature("sequence parallel", sequence_parallel, sequence_parallel_alone),
    Feature("tensor parallel and FSDP2, 2 x 2", tensor_and_data_parallel, trained_alone),
]
