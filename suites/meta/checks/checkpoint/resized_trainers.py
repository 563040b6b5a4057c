"""Trainings that other ranks than have saved can resume, and their broken twins."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DATA = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
NUM_LAYERS, GLOBAL_BATCH = 4, 8


class Sampler:
    """The share of this rank in each global batch, from a position on."""

    counts_per_rank = False

    def __init__(self):
        self.position = 0

    def next_batch(self):
        ranks, rank = dist.get_world_size(), dist.get_rank()
        share = GLOBAL_BATCH // ranks
        first = self.position * (ranks if self.counts_per_rank else 1)
        self.position += share if self.counts_per_rank else GLOBAL_BATCH
        return DATA[(torch.arange(share) * ranks + rank + first) % len(DATA)]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class SamplerOfOneRank(Sampler):
    counts_per_rank = True


class DataParallel:
    """A data-parallel training, whose rank 0 saves for all."""

    dropout, has_rank_files, forgets, sampler = 0.0, False, (), Sampler

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(3, 1))
        torch.manual_seed(dist.get_rank())
        self.optimizer = self.make_optimizer()
        self.batches = self.sampler()

    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, i):
        self.model.zero_grad()
        self.model(self.batches.next_batch()).square().mean().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.optimizer.step()

    def state(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "sampler": self.batches}
        return {name: one.state_dict() for name, one in parts.items()} | {"random": torch.get_rng_state()}

    def restore(self, state):
        for name, part in {"model": self.model, "optimizer": self.optimizer, "sampler": self.batches}.items():
            if name not in self.forgets or dist.get_world_size() > 1:
                part.load_state_dict(state[name])
        if self.has_rank_files:
            torch.set_rng_state(state["random"])

    def file(self, path):
        return path / f"rank-{dist.get_rank() if self.has_rank_files else 0}.pt"

    def save(self, path):
        path.mkdir(exist_ok=True)
        state = self.state()
        if self.has_rank_files or dist.get_rank() == 0:
            torch.save(state, self.file(path))
        dist.barrier()

    def load(self, path):
        self.restore(torch.load(self.file(path)))

    @classmethod
    def start(cls):
        program = cls()
        return program.model, program.step, program.save, program.load


class ShardedMomentum:
    """SGD whose momentum is cut over the ranks, and padded to equal parts. The file has it whole."""

    def __init__(self, parameters, keeps_padding):
        self.parameters, self.keeps_padding, self.ranks = list(parameters), keeps_padding, dist.get_world_size()
        self.momenta = [torch.zeros(self.padded(one) // self.ranks) for one in self.parameters]

    def padded(self, parameter):
        return -(-parameter.numel() // self.ranks) * self.ranks

    @torch.no_grad()
    def step(self):
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            momentum.mul_(0.9).add_(self.shard(parameter.grad.flatten(), parameter))
            parameter -= 0.1 * self.whole(momentum)[: parameter.numel()].view_as(parameter)

    def shard(self, whole, parameter):
        padded = torch.zeros(self.padded(parameter))
        padded[: len(whole)] = whole
        return padded.chunk(self.ranks)[dist.get_rank()]

    def whole(self, shard):
        shards = [torch.empty_like(shard) for _ in range(self.ranks)]
        dist.all_gather(shards, shard)
        return torch.cat(shards)

    def in_file(self, parameter):
        return self.padded(parameter) if self.keeps_padding else parameter.numel()

    def state_dict(self):
        pairs = zip(self.momenta, self.parameters, strict=True)
        return {"momenta": torch.cat([self.whole(momentum)[: self.in_file(one)] for momentum, one in pairs])}

    def load_state_dict(self, state):
        everything = state["momenta"]
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            momentum.copy_(self.shard(everything[: self.in_file(parameter)], parameter))
            everything = everything[self.in_file(parameter) :]


class Sharded(DataParallel):
    keeps_padding = False

    def make_optimizer(self):
        return ShardedMomentum(self.model.parameters(), self.keeps_padding)


class OwnedMomentum:
    """SGD whose ranks each keep the momenta of some parameters, and broadcast what they update."""

    def __init__(self, model):
        self.named = dict(model.named_parameters())
        self.owner = {name: number % dist.get_world_size() for number, name in enumerate(self.named)}
        self.momenta = {name: torch.zeros_like(one) for name, one in self.named.items() if self.is_own(name)}

    def is_own(self, name):
        return self.owner[name] == dist.get_rank()

    @torch.no_grad()
    def step(self):
        for name, parameter in self.named.items():
            if self.is_own(name):
                self.momenta[name] = 0.9 * self.momenta.get(name, 0) + parameter.grad
                parameter -= 0.1 * self.momenta[name]
            dist.broadcast(parameter, self.owner[name])

    def state_dict(self):
        return {"momenta": self.momenta}

    def load_state_dict(self, state):
        self.momenta = state["momenta"]


class Owned(DataParallel):
    """A training whose ranks write the momenta that they own into files of their own."""

    has_rank_files, reads_all_files = True, True

    def make_optimizer(self):
        return OwnedMomentum(self.model)

    def load(self, path):
        files = sorted(path.iterdir())
        state = torch.load(files[dist.get_rank() % len(files)])
        if self.reads_all_files:
            everything = {name: one for file in files for name, one in torch.load(file)["optimizer"]["momenta"].items()}
            own = {name: one for name, one in everything.items() if self.optimizer.is_own(name)}
            state["optimizer"] = {"momenta": own}
        self.restore(state)


class FullySharded(DataParallel):
    """A training with FSDP2 and AdamW, saved with ``torch.distributed.checkpoint``."""

    def make_optimizer(self):
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, i):
        self.model.zero_grad()
        self.model(self.batches.next_batch()).square().mean().backward()
        self.optimizer.step()

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "sampler": self.batches.state_dict()}

    def save(self, path):
        checkpoint.save(self.state(), checkpoint_id=str(path))

    def load(self, path):
        state = self.state()
        checkpoint.load(state, checkpoint_id=str(path))
        of_model, of_optimizer = {"model_state_dict": state["model"]}, {"optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **of_model, **of_optimizer)
        self.batches.load_state_dict(state["sampler"])


class Layers:
    """A training of a stack of layers, of which each rank has a part and trains it alone."""

    numbers_are_local = False

    def __init__(self):
        torch.manual_seed(0)
        stack = [nn.Linear(3, 3) for _ in range(NUM_LAYERS)]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        each = NUM_LAYERS // self.ranks
        self.stage = nn.ModuleDict({str(n): stack[n] for n in range(self.rank * each, (self.rank + 1) * each)})
        self.optimizer = torch.optim.SGD(self.stage.parameters(), lr=0.5)
        self.in_file = {name: str(place) if self.numbers_are_local else name for place, name in enumerate(self.stage)}

    def step(self, i):
        self.optimizer.zero_grad()
        for layer in self.stage.values():
            torch.tanh(layer(DATA[i * GLOBAL_BATCH :][:GLOBAL_BATCH])).square().mean().backward()
        self.optimizer.step()

    def save(self, path):
        path.mkdir(exist_ok=True)
        state = {self.in_file[name]: layer.state_dict() for name, layer in self.stage.items()}
        torch.save(state, path / f"stage-{self.rank}.pt")
        dist.barrier()

    def load(self, path):
        files = sorted(path.iterdir())
        chosen = [files[self.rank]] if len(files) == self.ranks else files
        merged = {name: state for file in chosen for name, state in torch.load(file).items()}
        for name, layer in self.stage.items():
            layer.load_state_dict(merged[self.in_file[name]])

    @classmethod
    def start(cls):
        program = cls()
        return program.stage, program.step, program.save, program.load
