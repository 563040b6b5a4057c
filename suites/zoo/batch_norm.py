"""Bugs of batch norm: statistics of ranks that are not those of the whole batch, and buffers that differ."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_replicas_in_sync, check_sharded_layer

from .entry import entry

CHANNELS = 3


@entry(
    "bn-buffers-eval",
    "mmdetection PR #4582",
    check="check_replicas_in_sync",
    cause="each rank updates them from its own data, and nothing synchronises them",
)
def evaluates_with_statistics_of_each_rank(broken, world):
    """Evaluate with the running statistics of each rank: the hook before the evaluation does not broadcast them."""

    def start():
        ddp = DistributedDataParallel(
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), broadcast_buffers=False
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

        def before_evaluation():
            for module in ddp.modules():
                if isinstance(module, nn.BatchNorm1d):
                    dist.broadcast(module.running_mean, 0)
                    dist.broadcast(module.running_var, 0)

        def train_epoch(_, iterations=2):
            ddp.train()
            for _ in range(iterations):
                optimizer.zero_grad()
                functional.mse_loss(ddp(torch.randn(8, 3)), torch.randn(8, 1)).backward()
                optimizer.step()
            if not broken:
                before_evaluation()
            ddp.eval()
            with torch.no_grad():
                ddp.module(torch.randn(8, 3))

        return ddp, train_epoch

    check_replicas_in_sync(start, world)


def flat(tensor):
    """Return the tensor with shape (samples, channels)."""
    return tensor.transpose(1, -1).reshape(-1, tensor.shape[1])


def like(rows, tensor):
    """Return ``rows`` in the shape of ``tensor``."""
    return rows.view(tensor.transpose(1, -1).shape).transpose(1, -1)


def add_over_ranks(*parts):
    """Return the sums over ranks of tensors with one dimension, in one collective."""
    joint = torch.cat(parts)
    dist.all_reduce(joint)
    return joint.split([len(part) for part in parts])


class SyncBatchNormFunction(torch.autograd.Function):
    """Batch norm over the samples of all ranks; ``bug`` is the line that is wrong."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, running_mean, running_var, bug):
        x, world_size = flat(inputs), dist.get_world_size()
        count = x.new_tensor([len(x)])
        if bug == "var-uneven":
            (mean,) = add_over_ranks(x.mean(0) / world_size)
            var = ((x - mean) ** 2).mean(0)
            total = count * world_size
        elif bug == "empty-rank":
            own_mean, own_square = x.mean(0), (x**2).mean(0)
            total, mean, square = add_over_ranks(count, own_mean * count, own_square * count)
            mean = mean / total
            var = square / total - mean**2
        else:
            total, mean, square = add_over_ranks(count, x.sum(0), (x**2).sum(0))
            mean = mean / total
            var = square / total - mean**2
        invstd = (var + 1e-5).rsqrt()
        running_mean.lerp_(mean, 0.1)
        running_var.lerp_(var * total / (total - 1), 0.1)
        ctx.save_for_backward(inputs, weight, mean, invstd, total)
        ctx.bug = bug
        return like((x - mean) * invstd * weight + bias, inputs)

    @staticmethod
    def backward(ctx, grad_output):
        inputs, weight, mean, invstd, total = ctx.saved_tensors
        if ctx.bug == "noncontig":
            grad_output = grad_output.contiguous().as_strided(inputs.shape, inputs.stride())
        x, dy = (flat(inputs) - mean) * invstd, flat(grad_output)
        own_dy, own_dy_x = dy.sum(0), (dy * x).sum(0)
        sum_dy, sum_dy_x = add_over_ranks(own_dy, own_dy_x)
        if ctx.bug == "dgrad-uneven":
            total = len(x) * dist.get_world_size()
        dx = weight * invstd * (dy - sum_dy / total - x * sum_dy_x / total)
        return like(dx, inputs), own_dy_x, own_dy, None, None, None


class SyncBatchNorm(nn.Module):
    """A hand-written replacement of ``norm``; torch's own refuses tensors of the CPU."""

    def __init__(self, norm, bug):
        super().__init__()
        self.weight, self.bias, self.bug = norm.weight, norm.bias, bug
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, inputs):
        self.num_batches_tracked += 1
        buffers = self.running_mean, self.running_var
        return SyncBatchNormFunction.apply(inputs, self.weight, self.bias, *buffers, self.bug)


def check_sync_batch_norm(bug, sizes, world, shape=(), make=lambda: nn.BatchNorm1d(CHANNELS), shard=SyncBatchNorm):
    """Check a batch norm whose ranks have ``sizes`` samples with the whole one."""

    def own_samples(tensor):
        return tensor.split(sizes)[dist.get_rank()]

    def add_gradients(module):
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)

    def convert_sync_batchnorm(norm):
        return shard(norm, bug)

    generator = torch.Generator().manual_seed(10)
    batches = [torch.randn(sum(sizes), *(shape or (CHANNELS,)), generator=generator) for _ in range(2)]
    check_sharded_layer(
        convert_sync_batchnorm,
        make,
        batches,
        world,
        world_size=len(sizes),
        inputs_of=own_samples,
        output_of=own_samples,
        sync=add_gradients,
    )


@entry(
    "syncbn-var-uneven",
    "pytorch #22192, apex #387",
    check="check_sharded_layer",
    cause="each rank uses a mean or variance of its own samples: with the same samples on every rank it is right",
)
def takes_the_plain_mean_of_the_means(broken, world):
    """Average the means of ranks with unlike batches, and take the variance of the own samples (SyncBatchNorm)."""
    check_sync_batch_norm("var-uneven" if broken else None, [5, 3], world)


@entry(
    "syncbn-dgrad-uneven",
    "pytorch PR #36382",
    check="check_sharded_layer",
    cause="ranks hold 5 and 3 samples: with 4 on every rank it is right; .* a division by world_size times the rank's "
    "own number; .* look at the backward pass",
)
def divides_by_the_own_count_in_the_backward_pass(broken, world):
    """Divide sums by the samples of the rank times world_size in the backward pass of SyncBatchNorm."""
    check_sync_batch_norm("dgrad-uneven" if broken else None, [5, 3], world)


@entry(
    "syncbn-empty-rank",
    "pytorch PR #74944",
    check="check_sharded_layer",
    cause="rank 1 holds no samples: with a sample on every rank it is right; .* NaN is 0 / 0, as the mean of no",
)
def takes_the_mean_of_no_samples(broken, world):
    """Take the mean of no samples, 0 / 0, as the part of an empty rank in the statistics of SyncBatchNorm."""
    check_sync_batch_norm("empty-rank" if broken else None, [4, 0], world)


class ChannelsLast(nn.Module):
    """A batch norm of features that come as (samples, places, channels)."""

    def __init__(self, norm=None, bug=None):
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS) if norm is None else SyncBatchNorm(norm.norm, bug)

    def forward(self, inputs):
        return self.norm(inputs.permute(0, 2, 1))


@entry(
    "syncbn-noncontig",
    "pytorch #62967, #64039",
    check="check_sharded_layer",
    cause="depends on the strides of its inputs: with dimensions 1 and 2 exchanged in memory, the same values give the "
    "right result; .* or with those of another tensor, as by as_strided",
)
def reads_gradients_with_the_strides_of_the_input(broken, world):
    """Read the gradient with the strides of the input, which is permuted, in the backward pass of SyncBatchNorm."""
    check_sync_batch_norm(
        "noncontig" if broken else None, [2, 2], world, shape=(4, CHANNELS), make=ChannelsLast, shard=ChannelsLast
    )
