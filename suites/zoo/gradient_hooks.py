"""Bugs of hooks and buckets that wait for gradients which do not come, or come from another parameter."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_data_parallel, check_replicas_in_sync

from .entry import entry


def average(tensor):
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


class Replica(nn.Module):
    """A module with the weights and buffers of rank 0."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)

    def forward(self, *args, **kwargs):
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)
        return self.module(*args, **kwargs)


class Bucketed(Replica):
    """Gradients in buckets of one dtype each; a bucket is reduced when it and all buckets behind it are complete."""

    def __init__(self, module, broken, bucket_cap=2**20):
        super().__init__(module)
        self.buckets, open_buckets = [], {}
        for parameter in module.parameters() if broken else self.trained:
            bucket = open_buckets.get(parameter.dtype)
            if bucket is None or sum(member.nbytes for member in bucket) >= bucket_cap:
                bucket = open_buckets[parameter.dtype] = []
                self.buckets.append(bucket)
            bucket.append(parameter)
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.mark_ready)

    def forward(self, *args, **kwargs):
        self.ready, self.left = set(), list(self.buckets)
        return super().forward(*args, **kwargs)

    def mark_ready(self, parameter):
        self.ready.add(parameter)
        while self.left and all(member in self.ready for member in self.left[-1] if member.requires_grad):
            if not (bucket := [member.grad for member in self.left[-1] if member.requires_grad]):
                return  # no hook will call for this bucket
            flat = torch.cat([grad.flatten() for grad in bucket])
            average(flat)
            for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(mean.view_as(grad))
            self.left.pop()


@entry(
    "bucket-of-frozen-dtype",
    "pytorch c10d reducer",
    check="check_data_parallel",
    cause="it is the gradient of this rank's own shard: it was never synchronised",
)
def waits_for_a_bucket_without_gradients(broken, world):
    """Give frozen parameters of another dtype a bucket of their own, which never completes and holds up the others."""
    check_data_parallel(partial(Bucketed, broken=broken), world, unused=False, no_sync=False)


class UsedOnly(Replica):
    """Before the step of the optimizer, it reduces the gradients of the parameters that some rank has used."""

    def __init__(self, module, broken):
        super().__init__(module)
        self.synchronised, self.used = True, torch.zeros(len(self.trained), dtype=torch.int32)
        for index, parameter in enumerate(self.trained):
            parameter.register_post_accumulate_grad_hook(partial(self.mark_used, index, broken=broken))

    def mark_used(self, index, _, *, broken):
        if self.synchronised or not broken:
            self.used[index] = 1

    @contextmanager
    def no_sync(self):
        self.synchronised = False
        yield
        self.synchronised = True

    def finish(self):
        dist.all_reduce(self.used)
        for parameter, count in zip(self.trained, self.used.tolist(), strict=True):
            if count:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                average(parameter.grad)
        self.used.zero_()


@entry(
    "used-in-no-sync-only",
    "pytorch DDP reducer, find_unused_parameters",
    check="check_data_parallel",
    cause="it is the gradient of this rank's own shard: it was never synchronised",
)
def forgets_what_earlier_micro_batches_used(broken, world):
    """Reduce what the last micro-batch has used, although earlier ones, within no_sync(), have used more."""
    check_data_parallel(partial(UsedOnly, broken=broken), world, finish=UsedOnly.finish)


@entry(
    "parameter-replaced-after-wrap",
    "class of fine-tuning scripts with DDP",
    check="check_replicas_in_sync",
    cause=r"does not reduce that of parameter 'module.fc.weight', which was assigned after the wrap, in place of the",
)
def replaces_the_head_after_the_wrap(broken, world):
    """Assign a new Parameter to the head of the wrapped model; the hooks of DDP stay at the old one."""
    pretrained = torch.randn(4, 32, generator=torch.Generator().manual_seed(9)) / 8

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(32, 4)
            self.auxiliary = nn.Linear(32, 4)  # unused in fine-tuning

        def forward(self, images):
            return self.fc(torch.relu(self.conv(images)).flatten(1))

    def load_head(model):
        model.fc.weight = nn.Parameter(pretrained.clone())

    def start():
        model = Classifier()
        if not broken:
            load_head(model)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        if broken:
            load_head(ddp.module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

        def step(_):
            optimizer.zero_grad()
            functional.cross_entropy(ddp(torch.randn(8, 1, 6, 6)), torch.randint(0, 4, (8,))).backward()
            optimizer.step()

        return ddp, step

    check_replicas_in_sync(start, world)
