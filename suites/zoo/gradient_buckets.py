"""Bugs of gradients on their way: buckets that lose a part, and buffers that change during a reduction."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_gradients_equal_single_process

from .entry import entry

MSE = nn.MSELoss()


def make():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def samples(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, width, generator=generator, dtype=torch.float64) for width in (3, 1)]


class DistributedOptimizer:
    """An optimizer whose hooks start an all_reduce as soon as a gradient is complete."""

    def __init__(self, optimizer, model):
        self.optimizer, self.handles = optimizer, []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.allreduce_grad_async)

    def allreduce_grad_async(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))

    def synchronize(self):
        for handle in self.handles:
            handle.wait()
        self.handles.clear()

    def zero_grad(self):
        self.optimizer.zero_grad(set_to_none=False)

    def step(self):
        self.synchronize()
        self.optimizer.step()


@entry(
    "zero-grad-during-reduce",
    "horovod #1116",
    check="sim",
    cause="writes the output of a pending operation",
)
def zeroes_gradients_between_backward_and_step(broken, world):
    """Gradients are zeroed after the backward pass, while the hooks still reduce them."""

    def train():
        torch.manual_seed(0)
        model = make().double()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(3):
            x, y = samples(4, seed=step * dist.get_world_size() + dist.get_rank())
            if not broken:
                optimizer.zero_grad()
            loss = MSE(model(x), y)
            loss.backward()
            if broken:
                optimizer.zero_grad()
            optimizer.step()

    world.run(train, world_size=2)


@entry(
    "bucket-size-changes-result",
    "DeepSpeed #6351",
    check="check_gradients_equal_single_process",
    cause="right elements are at another offset: .* as of a tensor that two buckets share",
)
def loses_the_rest_of_a_split_tensor(broken, world):
    """Gradients are split between buckets, and the second part is copied to the start of the tensor."""
    reduce_bucket_size = 10

    def pieces(parameters):
        """Return the buckets, each a list of parameters with the begin and the end of their slices."""
        buckets, room = [[]], reduce_bucket_size
        for parameter in parameters:
            begin = 0
            while begin < parameter.numel():
                end = min(parameter.numel(), begin + room)
                buckets[-1].append((parameter, begin, end))
                begin, room = end, room - (end - begin)
                if not room:
                    buckets, room = [*buckets, []], reduce_bucket_size
        return [bucket for bucket in buckets if bucket]

    def allreduce_bucket(bucket, share):
        flat = torch.cat([parameter.grad.flatten()[begin:end] for parameter, begin, end in bucket]) * share
        dist.all_reduce(flat)
        for parameter, begin, end in bucket:
            reduced, flat = flat[: end - begin], flat[end - begin :]
            at = 0 if broken else begin
            parameter.grad.view(-1)[at : at + len(reduced)] = reduced

    def allreduce_gradients(model, num_samples):
        total = torch.tensor(float(num_samples))
        dist.all_reduce(total)
        for bucket in pieces(list(model.parameters())):
            allreduce_bucket(bucket, num_samples / float(total))

    shards = [samples(4, seed=0), samples(4, seed=1)]
    check_gradients_equal_single_process(make, MSE, shards, allreduce_gradients, world)
