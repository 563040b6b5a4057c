"""Bugs of metrics and of learning-rate schedules: numbers of one rank that stand for those of all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau

from pdlcheck.checks import check_metric, check_same_trajectory

from .entry import entry

ROWS = torch.randn(48, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def validation_step(model, inputs, targets):
    return nn.functional.mse_loss(model(inputs), targets)


def local_batches(*tensors, batch_size=4):
    """Return the batches of this rank, as a sampler without padding deals them."""
    own = [tensor[dist.get_rank() :: dist.get_world_size()] for tensor in tensors]
    return zip(*(part.split(batch_size) if len(part) else () for part in own), strict=True)


def regression():
    torch.manual_seed(0)
    return nn.Linear(3, 1).double(), [ROWS[:29, :3], ROWS[:29, 3:]]


@entry(
    "metric-mean-of-means",
    "Lightning #12354; RecBole PR #1872",
    check="check_metric",
    cause="each counted once: weigh them",
)
def averages_the_means_of_ranks(broken, world):
    """Each rank has the mean loss of its samples, and each mean counts once, whatever the number of samples."""
    model, samples = regression()

    def validate(inputs, targets):
        total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for x, y in local_batches(inputs, targets):
            total += validation_step(model, x, y).detach() * len(x)
            count += len(x)
        if broken:
            mean = total / count
            dist.all_reduce(mean)
            return {"val_loss": mean.item() / dist.get_world_size()}
        dist.all_reduce(total)
        dist.all_reduce(count)
        return {"val_loss": (total / count).item()}

    check_metric(validate, samples, world)


@entry(
    "metric-rank0-only",
    "transformer-xl #14; HydraGNN PR #136",
    check="check_metric",
    cause="rank 0 alone: it was not reduced",
)
def reports_the_loss_of_rank_0(broken, world):
    """Only the samples of rank 0 are in the loss that rank 0 logs."""
    model, samples = regression()

    def evaluate(inputs, targets):
        model.eval()
        total_len, total_loss = 0, 0.0
        with torch.no_grad():
            for x, y in local_batches(inputs, targets):
                total_loss += len(x) * validation_step(model, x, y).item()
                total_len += len(x)
        sums = torch.tensor([total_loss, total_len], dtype=torch.float64)
        if not broken:
            dist.all_reduce(sums)
        return (sums[0] / sums[1]).item() if dist.get_rank() == 0 else None  # rank 0 logs it

    check_metric(evaluate, samples, world)


class AcceleratedScheduler:
    def __init__(self, scheduler, steps_per_call):
        self.scheduler, self.steps_per_call = scheduler, steps_per_call

    def step(self, *metric):
        for _ in range(self.steps_per_call):
            self.scheduler.step(*metric)


@entry(
    "lr-sched-times-w",
    "accelerate #2926; transformers PR #24088; LTX-Video-Trainer #67",
    check="check_same_trajectory",
    cause="the gradients are right, and the optimizer has lr=0.00833333 .* in its step 2, that of plain lr=0.00916667",
)
def steps_the_scheduler_for_every_process(broken, world):
    """One step of the optimizer takes as many steps of the scheduler as there are processes."""
    num_training_steps = 12

    def fit(model, optimizer, scheduler, steps, shard):
        for batch in ROWS.split(8)[:steps]:
            optimizer.zero_grad()
            inputs = shard(batch)
            validation_step(model, inputs[:, :3], inputs[:, 3:]).backward()
            optimizer.step()
            scheduler.step()

    def inner_training_loop(model, steps):
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        decay = LinearLR(optimizer, 1.0, 0.0, total_iters=num_training_steps)
        scheduler = AcceleratedScheduler(decay, dist.get_world_size() if broken else 1)
        fit(ddp, optimizer, scheduler, steps, lambda batch: batch[dist.get_rank() :: dist.get_world_size()])

    def plain(model, steps):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        decay = LinearLR(optimizer, 1.0, 0.0, total_iters=num_training_steps)
        fit(model, optimizer, decay, steps, lambda batch: batch)

    check_same_trajectory(inner_training_loop, plain, lambda: nn.Linear(3, 1), world)


def run_plateau(broken, world, **how):
    """Check epochs of training, each followed by a validation whose loss goes to ReduceLROnPlateau."""
    train_rows, valid_rows = ROWS[:16], ROWS[16:24]

    def fit(model, scheduler_of, epochs, shard, mean):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        scheduler = scheduler_of(ReduceLROnPlateau(optimizer, factor=0.5, patience=2))
        for _ in range(epochs):
            for batch in train_rows.split(8):
                optimizer.zero_grad()
                inputs = shard(batch)
                validation_step(model, inputs[:, :3], inputs[:, 3:]).backward()
                optimizer.step()
            inputs = shard(valid_rows)
            with torch.no_grad():
                scheduler.step(mean(validation_step(model, inputs[:, :3], inputs[:, 3:])))

    def mean_over_ranks(loss):
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def accelerated(model, epochs):
        def prepare(scheduler):
            return AcceleratedScheduler(scheduler, dist.get_world_size() if broken else 1)

        own = lambda rows: rows[dist.get_rank() :: dist.get_world_size()]  # noqa: E731
        fit(DistributedDataParallel(model), prepare, epochs, own, mean_over_ranks)

    def plain(model, epochs):
        fit(model, lambda scheduler: scheduler, epochs, lambda rows: rows, float)

    check_same_trajectory(accelerated, plain, lambda: nn.Linear(3, 1), world, **how)


@entry(
    "plateau-times-w",
    "accelerate #3797",
    check="check_same_trajectory",
    judged="missed",
    why="bad epochs count double, but 4 steps have too few of them to exceed the patience; a longer run might "
    "go past the data of many tests; steps=12 shows the bug",
    also=lambda broken, world: run_plateau(broken, world, steps=12),
)
def steps_the_plateau_scheduler_for_every_process(broken, world):
    """Step a ReduceLROnPlateau once for each process at every validation, as its wrapper does."""
    run_plateau(broken, world)


@entry(
    "rank-0-validates-through-ddp",
    "pytorch #54059, #72897",
    check="sim",
    cause="differ in the operation: broadcast and barrier",
)
def validates_on_rank_0_through_the_wrapper(broken, world):
    """Rank 0 validates through the DDP module, whose forward pass broadcasts buffers, while the others wait for it."""

    def validate(model):
        model.eval()
        with torch.no_grad():
            losses = [validation_step(model, rows[:, :3], rows[:, 3:]).item() for rows in ROWS[32:].split(8)]
        model.train()
        return sum(losses) / len(losses)

    def main():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for rows in ROWS[:32].split(16):
                own = rows[dist.get_rank() :: dist.get_world_size()]
                optimizer.zero_grad()
                validation_step(model, own[:, :3], own[:, 3:]).backward()
                optimizer.step()
            if dist.get_rank() == 0:
                validate(model if broken else model.module)
            dist.barrier()

    world.run(main, world_size=2)
