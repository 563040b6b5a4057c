"""Models that the pipeline suites divide into stages, and their start functions."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from hypothesis import settings
from torch import nn

few = settings(max_examples=6)
MSE, SUM = nn.MSELoss(), nn.MSELoss(reduction="sum")
SGD = partial(torch.optim.SGD, lr=0.1)


def tanh_net(layers=4, width=3):
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())))


def samples(count, width=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, width, generator=generator) for _ in range(2))


def rank_of(group=None):
    return dist.get_rank(group), dist.get_world_size(group) - 1


def side_by_side(rank):
    """Return the groups of 2 x 2 ranks: 0 and 1 are one pipeline, 2 and 3 the other."""
    pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    stages = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return {"group": pipelines[rank // 2], "data_group": stages[rank % 2]}


def starter(subject, loss, **keywords):
    """Return a start function for the checks; ranks that need no inputs or targets get none."""

    def start(model):
        pipeline = subject(model, loss, **keywords)
        rank, last = rank_of(keywords.get("group"))

        def step(inputs, targets):
            result = pipeline.step(inputs if rank == 0 else None, targets if rank == last else None)
            return result.loss, result.outputs

        return pipeline.module, step

    start.__name__ = subject.__name__
    return start


def tied_net():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[4].weight = model[0].weight
    return model


def dropout_net():
    return nn.Sequential(
        nn.Linear(3, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def errors(world, program, world_size=2):
    """Return the error of each rank as text."""

    def caught():
        try:
            program(dist.get_rank())
        except (TypeError, ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return world.run(caught, world_size=world_size)
