"""DistributedDataParallel with its options and hooks, PostLocalSGD, and gradients reduced by hand."""

from __future__ import annotations

from functools import partial

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ..parity import training
from .entry import WORLD_SIZE, Feature, everywhere
from .models import STEPS, batch, make_model, make_sgd, plain, shard, train, trained_alone

RANKS = range(WORLD_SIZE)


def ddp(**options):
    model = make_model()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0003, **options)
    train(wrapped, make_sgd(model.parameters()))
    return plain(model)


def ddp_with_hook(hook):
    model = make_model()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0003)
    wrapped.register_comm_hook(None, hook)
    train(wrapped, make_sgd(model.parameters()))
    return plain(model)


def hook_of_the_users(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def ddp_with_hook_of_torch(name):
    """Train with a hook of torch under another name.

    torch refuses its bfloat16 hook by name unless the group is NCCL, although the hook does not need NCCL.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def hook(state, bucket):
        return getattr(default_hooks, name)(state, bucket)

    return ddp_with_hook(hook)


def train_6_steps(model, optimizer, data, before_step=lambda step: None):
    for step in range(6):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        before_step(step)
        optimizer.step()


def power_sgd():
    """Train with PowerSGD in one bucket, in which only the middle matrix is worth a compression to rank 1."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

    model = make_model()
    wrapped = DistributedDataParallel(model)
    state = hooks.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=3)
    wrapped.register_comm_hook(state, hooks.powerSGD_hook)
    train_6_steps(wrapped, make_sgd(model.parameters()), shard)
    return plain(model)


def power_sgd_alone():
    """Train by algorithm 1 of Vogels, Karimireddy, Jaggi, "PowerSGD" (2019), on the gradient of the whole batch."""
    model = make_model()
    middle, error = model[2].weight, torch.zeros(8, 8, dtype=torch.float64)
    torch.manual_seed(numpy.random.RandomState(0).randint(1_000_000_000))  # as torch's hook draws its first Q
    right = torch.randn(8, 1, dtype=torch.float64)

    def compress(step):
        nonlocal error, right
        if step >= 2:
            gradient = middle.grad + error
            left = torch.linalg.qr(gradient @ torch.linalg.qr(right).Q).Q
            right = gradient.T @ left
            middle.grad = left @ right.T
            error = gradient - middle.grad

    train_6_steps(model, make_sgd(model.parameters()), batch, compress)
    return everywhere(plain(model))


def ddp_with_accumulation():
    model = make_model()
    wrapped, optimizer = DistributedDataParallel(model), make_sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        first, second = shard(step).chunk(2)
        with wrapped.no_sync():
            (wrapped(first).square().mean() / 2).backward()
        (wrapped(second).square().mean() / 2).backward()
        optimizer.step()
    return plain(model)


def ddp_join():
    model = make_model()
    wrapped = DistributedDataParallel(model)
    with wrapped.join():
        train(wrapped, make_sgd(model.parameters()))
    return plain(model)


def post_local_sgd():
    """Average at every step from the first on, so that it is synchronous SGD."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = make_model()
    wrapped = DistributedDataParallel(model)
    state = hooks.PostLocalSGDState(process_group=None, subgroup=dist.group.WORLD, start_localSGD_iter=100)
    wrapped.register_comm_hook(state, hooks.post_localSGD_hook)
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    train(wrapped, PostLocalSGDOptimizer(make_sgd(model.parameters()), averager))
    return plain(model)


def functional_collectives():
    """Sum gradients by functional collectives, which wait when their result is used."""
    import torch.distributed._functional_collectives as funcol

    model = make_model()
    optimizer = make_sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(shard(step)).square().mean().backward()
        sums = [funcol.all_reduce(p.grad, "avg", dist.group.WORLD) for p in model.parameters()]
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad.copy_(total)
        optimizer.step()
    return plain(model)


# -- in one process: a model for each rank of the programs of parity -------------------------------


class _Replicas:
    """A model and an optimizer for each rank, all in one process."""

    def __init__(self, make_model=training._model, **options):
        self.models = [make_model() for _ in RANKS]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, **options) for model in self.models]

    def backward(self, step, ranks=RANKS, **inputs):
        for rank in ranks:
            mine = {name: value(rank) for name, value in inputs.items()}
            self.models[rank](training._data_of(rank, step), **mine).square().mean().backward()

    def average_gradients(self, ranks=RANKS, count=None):
        """Average over ``ranks``; ranks without gradients add nothing. ``count`` is the divisor, else their number."""
        for parameters in zip(*(self.models[rank].parameters() for rank in ranks), strict=True):
            total = sum(p.grad for p in parameters if p.grad is not None) / (count or len(ranks))
            for parameter in parameters:
                parameter.grad = total.clone()

    def average_weights(self):
        with torch.no_grad():
            for parameters in zip(*(model.parameters() for model in self.models), strict=True):
                mean = sum(parameters) / len(parameters)
                for parameter in parameters:
                    parameter.copy_(mean)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def weights(self):
        return [training._weights(model) for model in self.models]


def unused_parameters_alone():
    replicas = _Replicas()
    for step in range(3):
        replicas.backward(step, through_second=lambda rank, step=step: (rank + step) % 2 == 0)
        replicas.average_gradients()
        replicas.step()
    return replicas.weights()


def uneven_inputs_alone():
    """Train where rank r has r + 1 batches; a rank without a batch counts in the mean with a zero gradient."""
    replicas = _Replicas()
    for step in range(WORLD_SIZE):
        replicas.backward(step, range(step, WORLD_SIZE))
        replicas.average_gradients()
        replicas.step()
    return replicas.weights()


def two_groups_alone():
    replicas = _Replicas(momentum=0.9)
    for step in range(3):
        replicas.backward(step)
        replicas.average_gradients([0, 1])
        replicas.average_gradients([2, 3])
        replicas.step()
    return replicas.weights()


def post_local_sgd_alone():
    """Take two synchronous steps; then pairs average gradients, and all average weights at every second step."""
    replicas = _Replicas()
    for step in range(5):
        replicas.backward(step)
        for ranks in [RANKS] if step < 2 else [[0, 1], [2, 3]]:
            replicas.average_gradients(ranks)
        replicas.step()
        if step >= 2 and step % 2 == 0:
            replicas.average_weights()
    return replicas.weights()


def buffers_alone():
    """Start each forward pass with the buffers of rank 0."""

    def make():
        torch.manual_seed(0)
        return training._with_buffers()

    replicas = _Replicas(make)
    for step in range(2):
        for model in replicas.models[1:]:
            for buffer, of_rank_0 in zip(model.buffers(), replicas.models[0].buffers(), strict=True):
                buffer.copy_(of_rank_0)
        replicas.backward(step)
        replicas.average_gradients()
        replicas.step()
    return [[*training._weights(m), *(buffer.clone() for buffer in m.buffers())] for m in replicas.models]


def sampler_alone():
    seen = []
    for rank in RANKS:
        sampler = DistributedSampler(range(10), num_replicas=WORLD_SIZE, rank=rank, shuffle=True, seed=3)
        seen.append([])
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen[-1] += [batch.float() for batch in DataLoader(range(10), batch_size=2, sampler=sampler)]
    return seen


HALVES = {"rtol": 1e-2}  # gradients are added in float16, which has 11 bits, or bfloat16, which has 8

FEATURES = [
    Feature("DDP", ddp, trained_alone),
    Feature("DDP, gradient_as_bucket_view", partial(ddp, gradient_as_bucket_view=True), trained_alone),
    Feature("DDP, static_graph", partial(ddp, static_graph=True), trained_alone),
    Feature("DDP, find_unused_parameters, all used", partial(ddp, find_unused_parameters=True), trained_alone),
    Feature("DDP, find_unused_parameters", training.ddp_that_finds_unused_parameters, unused_parameters_alone),
    Feature("DDP, no_sync", ddp_with_accumulation, trained_alone),
    Feature("DDP, join, even inputs", ddp_join, trained_alone),
    Feature("DDP, join, uneven inputs", training.ddp_with_uneven_inputs, uneven_inputs_alone),
    Feature("DDP, buffers broadcast", training.ddp_with_buffers, buffers_alone),
    Feature("DDP, process_group", training.ddp_on_two_meshes_of_two, two_groups_alone),
    Feature("DDP, hook of the user's", partial(ddp_with_hook, hook_of_the_users), trained_alone),
    Feature("DDP, allreduce_hook", partial(ddp_with_hook_of_torch, "allreduce_hook"), trained_alone),
    Feature("DDP, fp16_compress_hook", partial(ddp_with_hook_of_torch, "fp16_compress_hook"), trained_alone, **HALVES),
    Feature("DDP, bf16_compress_hook", partial(ddp_with_hook_of_torch, "bf16_compress_hook"), trained_alone, **HALVES),
    Feature("DDP, PowerSGD of rank 1, one bucket", power_sgd, power_sgd_alone),
    Feature("PostLocalSGD, period 1", post_local_sgd, trained_alone),
    Feature("PostLocalSGD, period 2, in pairs", training.post_local_sgd, post_local_sgd_alone),
    Feature("gradients by functional all_reduce", functional_collectives, trained_alone),
    Feature("DistributedSampler", training.distributed_sampler, sampler_alone),
]
