"""Bugs of checkpoints: state that is not saved, not loaded, or overwritten, and files that are read too early."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from pdlcheck.checks import check_replicas_in_sync, check_resume

from .entry import entry

DATA = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


class Trainer:
    """A data-parallel training whose rank 0 writes ``model``, ``optimizer`` and the number of steps."""

    dropout, seed = 0.0, 42

    def __init__(self):
        self.set_seed()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(self.dropout), nn.Linear(8, 1))
        self.set_seed(dist.get_rank())
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.05)
        self.steps = 0

    def set_seed(self, more=0):
        torch.manual_seed(self.seed + more)

    def batch(self, step):
        ranks = dist.get_world_size()
        return DATA[(step * ranks + dist.get_rank()) * 4 :][:4]

    def step(self, step):
        self.optimizer.zero_grad()
        self.ddp(self.batch(step)).square().mean().backward()
        self.optimizer.step()
        self.steps += 1

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def restore(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]

    def save(self, path):
        if dist.get_rank() == 0:
            torch.save(self.state(), path)
        dist.barrier()

    def load(self, path):
        self.restore(torch.load(path))

    @classmethod
    def start(cls):
        trainer = cls()
        return trainer.model, trainer.step, trainer.save, trainer.load


@entry(
    "optimizer-state-rank0",
    "Horovod #526",
    check="check_resume",
    cause="lost: optimizer;",
)
def loads_the_optimizer_on_rank_0(broken, world):
    """Rank 0 loads the checkpoint and broadcasts the parameters, but not the state of its optimizer."""

    class ElasticTrainer(Trainer):
        def load(self, path):
            if dist.get_rank() == 0:
                self.restore(torch.load(path))
            for parameter in self.model.parameters():
                dist.broadcast(parameter.detach(), 0)
            if not broken:
                self.broadcast_optimizer_state()

        def broadcast_optimizer_state(self):
            state = [self.optimizer.state_dict(), self.steps]
            dist.broadcast_object_list(state, 0)
            self.optimizer.load_state_dict(state[0])
            self.steps = state[1]

    check_resume(ElasticTrainer.start, world)


@entry(
    "resume-reseeds",
    "ms-swift #9935",
    check="check_resume",
    cause=r"the file holds them, but load leaves rank 0 in the state of torch.manual_seed\(42\): it seeds after",
)
def seeds_again_after_loading(broken, world):
    """Restored random state is overwritten by set_seed, which runs after the checkpoint is loaded."""

    class DropoutTrainer(Trainer):
        dropout = 0.1

        def save(self, path):
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, torch.get_rng_state())
            if dist.get_rank() == 0:
                torch.save(self.state() | {"rng_states": states}, path)
            dist.barrier()

        def load(self, path):
            state = torch.load(path)
            self.restore(state)
            torch.set_rng_state(state["rng_states"][dist.get_rank()])
            if broken:
                self.set_seed(dist.get_rank())

    check_resume(DropoutTrainer.start, world)


@entry(
    "resume-sampler-lost",
    "KempnerForge #51",
    check="check_resume",
    cause="lost: the numbers of LoaderTrainer;",
)
def replays_the_epoch(broken, world):
    """Positions in the data are not saved, so the training begins its epoch again."""

    class LoaderTrainer(Trainer):
        def __init__(self):
            super().__init__()
            self.sampler = DistributedSampler(DATA)
            self.loader = DataLoader(DATA, batch_size=4, sampler=self.sampler)
            self.epoch, self.place, self.batches = 0, 0, None

        def batch(self, step):
            if self.batches is None:
                self.sampler.set_epoch(self.epoch)
                self.batches = iter(self.loader)
                for _ in range(self.place):
                    next(self.batches)
            batch = next(self.batches)
            self.place += 1
            if self.place == len(self.loader):
                self.epoch, self.place, self.batches = self.epoch + 1, 0, None
            return batch

        def state(self):
            return super().state() | {"epoch": self.epoch} | ({} if broken else {"place": self.place})

        def restore(self, state):
            super().restore(state)
            self.epoch, self.place = state["epoch"], state.get("place", 0)

    check_resume(LoaderTrainer.start, world)


@entry(
    "resume-no-scheduler",
    "class of bugs",
    check="check_resume",
    cause="lost: scheduler;",
)
def restarts_the_scheduler(broken, world):
    """Checkpoints have no state of the scheduler, so the learning rate begins its warm-up again."""

    class ScheduledTrainer(Trainer):
        def __init__(self):
            super().__init__()
            warm_up = lambda step: min(1.0, (step + 1) / 8)  # noqa: E731
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up)

        def step(self, step):
            super().step(step)
            self.scheduler.step()

        def state(self):
            return super().state() | ({} if broken else {"scheduler": self.scheduler.state_dict()})

        def restore(self, state):
            super().restore(state)
            if "scheduler" in state:
                self.scheduler.load_state_dict(state["scheduler"])

    check_resume(ScheduledTrainer.start, world)


@entry(
    "ckpt-prefix-strict-false",
    "pytorch/examples #1029",
    check="check_resume",
    cause="load does not restore this parameter",
)
def loads_no_key_of_the_wrapped_model(broken, world):
    """Keys of the wrapped model have a prefix, and strict=False accepts that none of them is loaded."""

    class WrappedTrainer(Trainer):
        def state(self):
            return super().state() | {"model": self.ddp.state_dict()}

        def restore(self, state):
            model = state["model"]
            if not broken:
                model = {name.removeprefix("module."): value for name, value in model.items()}
            self.model.load_state_dict(model, strict=False)
            self.optimizer.load_state_dict(state["optimizer"])
            self.steps = state["steps"]

    check_resume(WrappedTrainer.start, world)


@entry(
    "ckpt-race-no-barrier",
    "D-FINE #221",
    check="check_replicas_in_sync",
    cause="rank . holds the parameters that it had after step 1: .* loaded a file, .* before the new one was written",
)
def reads_the_file_before_rank_0_has_written_it(broken, world):
    """Rank 0 writes the best model, and the other ranks load it at once for the second stage of the training."""
    stop_step = 1

    class SolverTrainer(Trainer):
        def step(self, step):
            super().step(step)
            if dist.get_rank() == 0:
                torch.save(self.state(), best)
            if step == stop_step:
                if not broken:
                    dist.barrier()
                self.restore(torch.load(best))

    def start():
        trainer = SolverTrainer()
        return trainer.model, trainer.step

    with tempfile.TemporaryDirectory() as folder:
        best = Path(folder) / "best_stg1.pth"
        check_replicas_in_sync(start, world)
