"""Bugs of checkpoints whose step or epoch is not that of the weights in them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from pdlcheck.checks import check_resume

from .entry import entry
from .resuming import DATA, Trainer


@entry(
    "async-save-names-a-later-step",
    "Megatron-Bridge #3267, PR #3269",
    check="check_resume",
    cause="lost: the numbers of AsyncTrainer;",
)
def writes_the_step_at_the_end_of_an_async_save(broken, world):
    """Write the number of the step when an asynchronous save ends, after a further step, not when it begins."""

    class AsyncTrainer(Trainer):
        def __init__(self):
            super().__init__()
            self.pending = []

        def batch(self, _):
            return super().batch(self.steps)

        def step(self, step):
            super().step(step)
            for finish in self.pending:
                finish()
            self.pending.clear()

        def save(self, path):
            path.mkdir(exist_ok=True)
            dist.barrier()
            if dist.get_rank() == 0:
                torch.save(self.state(), path / "weights.pt")
                steps = self.steps
                latest = path / "latest_iteration.txt"
                self.pending.append(lambda: latest.write_text(str(self.steps if broken else steps)))
            dist.barrier()

        def load(self, path):
            super().load(path / "weights.pt")
            self.steps = int((path / "latest_iteration.txt").read_text())

    check_resume(AsyncTrainer.start, world)


class Epochs(Trainer):
    """A training over epochs that draws its batches from ``batches_of(epoch, skipped)``."""

    def __init__(self):
        super().__init__()
        self.stream = None

    def batches(self):
        epoch, skipped = divmod(self.steps, len(DATA) // 4 // dist.get_world_size())
        while True:
            yield from self.batches_of(epoch, skipped)
            epoch, skipped = epoch + 1, 0

    def batch(self, _):
        self.stream = self.stream or self.batches()
        return next(self.stream)


def run_workers(broken, world, **how):
    """Check a training whose loader draws the order of an epoch as soon as its iterator is made, for its workers."""

    class FitLoop(Epochs):
        def __init__(self):
            super().__init__()
            self.sampler = DistributedSampler(DATA, seed=3)

        def batches_of(self, epoch, skipped):
            if not broken:
                self.sampler.set_epoch(epoch)
            order = list(self.sampler)  # fetched ahead
            self.sampler.set_epoch(epoch)
            for start in range(4 * skipped, len(order), 4):
                yield DATA[order[start : start + 4]]
            self.sampler.set_epoch(epoch + 1)

    check_resume(FitLoop.start, world, **how)


@entry(
    "iterator-before-set-epoch",
    "Lightning #21938, PR #21941",
    check="check_resume",
    judged="missed",
    why="the default saves within epoch 0, whose number a new sampler has; saved_after=6 shows the bug",
    also=lambda broken, world: run_workers(broken, world, saved_after=6, steps=9),
)
def makes_the_iterator_before_it_sets_the_epoch(broken, world):
    """Make the iterator of a loader with workers, which fetch ahead, before the sampler is told the epoch."""
    run_workers(broken, world)


def run_wrapped_sampler(broken, world, **how):
    """Check a training that leaves out, after a restart, the batches that its epoch has had."""

    class ShardedBatches:
        def __init__(self):
            self.epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            order = torch.randperm(len(DATA), generator=torch.Generator().manual_seed(self.epoch))
            yield from order[dist.get_rank() :: dist.get_world_size()].view(-1, 4).tolist()

    class Skipping:
        def __init__(self, sampler, count):
            self.sampler, self.count = sampler, count
            if not broken:
                self.set_epoch = sampler.set_epoch

        def __iter__(self):
            yield from list(self.sampler)[self.count :]

    class Script(Epochs):
        def batches_of(self, epoch, skipped):
            sampler = Skipping(ShardedBatches(), skipped) if skipped else ShardedBatches()
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            yield from DataLoader(DATA, batch_sampler=sampler)

    check_resume(Script.start, world, **how)


@entry(
    "skipping-sampler-hides-set-epoch",
    "ms-swift #10050, PR #9658; accelerate PR #4071",
    check="check_resume",
    judged="missed",
    why="the default saves within epoch 0, whose number a new sampler has; saved_after=6 shows the bug",
    also=lambda broken, world: run_wrapped_sampler(broken, world, saved_after=6, steps=9),
)
def skips_batches_by_a_sampler_without_set_epoch(broken, world):
    """Wrap the sampler, after a restart, in one that skips batches and has no set_epoch, so none is called."""
    run_wrapped_sampler(broken, world)
