"""The schedules of torch.distributed.pipelining: the gradients of every stage."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from .entry import WORLD_SIZE, Feature, everywhere
from .models import batch

# schedule -> stages on each rank
SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the last stage is on rank 0 again


def make_layers(schedule_name):
    torch.manual_seed(0)
    return [nn.Linear(4, 4).double() for _ in range(WORLD_SIZE * SCHEDULES[schedule_name])]


def pipeline(schedule_name):
    """Run a step with the layers of the model spread over the ranks; a batch's loss is the mean over micro-batches."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind = get_schedule_class(schedule_name)
    layers, rank = make_layers(schedule_name), dist.get_rank()
    count = len(layers)
    places = [rank + WORLD_SIZE * i for i in range(SCHEDULES[schedule_name])]
    if schedule_name in V_SHAPED:
        places = [rank, count - 1 - rank]
    stages = [PipelineStage(layers[place], place, count, torch.device("cpu")) for place in places]
    schedule = kind(stages if len(stages) > 1 else stages[0], 8, loss_fn=nn.functional.mse_loss)
    x = batch(0)
    schedule.step(*([x] if 0 in places else []), **({"target": torch.zeros_like(x)} if count - 1 in places else {}))
    mine = {place: [layers[place].weight.grad, layers[place].bias.grad] for place in places}
    gathered = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, mine)
    merged = {place: gradients for part in gathered for place, gradients in part.items()}
    return [gradient for place in range(count) for gradient in merged[place]]


def pipeline_alone(schedule_name):
    model = nn.Sequential(*make_layers(schedule_name))
    x = batch(0)
    nn.functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    return everywhere([parameter.grad for parameter in model.parameters()])


FEATURES = [
    Feature(f"pipelining, {name}", partial(pipeline, name), partial(pipeline_alone, name)) for name in SCHEDULES
]
