"""Bugs of checkpoints of divided models: names and places that are those of one rank."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_resume, check_sharded_layer

from .entry import entry

NUM_LAYERS, WIDTH = 4, 3


class Stage(nn.Module):
    """The layers of one of ``stages`` pipeline stages, and their names in a checkpoint."""

    def __init__(self, stage, stages):
        super().__init__()
        self.stage, self.stages = stage, stages
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS // stages))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def saved_names(self, broken):
        first = 0 if broken else self.stage * len(self.layers)
        places = {f"layers.{place}.": f"layers.{first + place}." for place in range(len(self.layers))}
        return {name: places[name[:9]] + name[9:] for name in self.state_dict()}

    def save(self, folder, broken):
        folder.mkdir(exist_ok=True)
        names = self.saved_names(broken)
        state = {names[name]: value for name, value in self.state_dict().items()}
        torch.save(state, folder / f"stage_{self.stage}.pt")

    def load(self, folder, broken):
        files = sorted(folder.glob("stage_*.pt"))
        if len(files) == self.stages:
            files = [files[self.stage]]
        merged = {name: value for file in files for name, value in torch.load(file).items()}
        self.load_state_dict({name: merged[saved] for name, saved in self.saved_names(broken).items()})


class WholeForward(nn.Module):
    """The whole model on all ranks: each stage in its turn, whose outputs it broadcasts."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    @torch.no_grad()
    def forward(self, x):
        for stage in range(self.stage.stages):
            x = self.stage(x) if stage == self.stage.stage else torch.empty_like(x)
            if self.stage.stages > 1:
                dist.broadcast(x, stage)
        return x


def load_in_two_stages(broken, world):
    def divide(whole):
        stage = Stage(dist.get_rank(), dist.get_world_size()).double()
        if stage.stage == 0:
            whole.stage.save(folder, broken)
        dist.barrier()
        stage.load(folder, broken)
        dist.barrier()
        return WholeForward(stage)

    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "one_stage"
        batches = [torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))]
        check_sharded_layer(divide, lambda: WholeForward(Stage(0, 1)), batches, world, world_size=2)


@entry(
    "ckpt-local-layer-numbers",
    "class of Megatron-like pipelines",
    check="check_resume",
    judged="missed",
    why="as many stages load as have saved; check_sharded_layer around a load in two stages shows the bug",
    also=load_in_two_stages,
)
def saves_layers_under_the_numbers_of_the_stage(broken, world):
    """Name the layers in a checkpoint by their places in the stage, so another number of stages reads wrong ones."""

    def start():
        stage = Stage(dist.get_rank(), dist.get_world_size())
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

        def step(i):
            optimizer.zero_grad()
            stage(torch.full((2, WIDTH), i + 1.0)).square().mean().backward()
            optimizer.step()

        return stage, step, lambda path: stage.save(path, broken), lambda path: stage.load(path, broken)

    check_resume(start, world)
