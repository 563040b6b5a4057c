"""Bugs of checkpoints of divided models: names and places that are those of one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_resume

from .entry import entry

NUM_LAYERS, WIDTH = 4, 3


class Stage(nn.Module):
    """The layers of one of ``stages`` pipeline stages, and their names in a checkpoint."""

    def __init__(self, stage, stages):
        super().__init__()
        self.stage, self.stages = stage, stages
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS // stages))

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


def training(broken):
    """Return a training of stages, each of which trains its layers alone."""

    def start():
        torch.manual_seed(0)
        whole = Stage(0, 1)
        stage = Stage(dist.get_rank(), dist.get_world_size())
        first = stage.stage * len(stage.layers)
        stage.layers = whole.layers[first : first + len(stage.layers)]
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

        def step(i):
            optimizer.zero_grad()
            for layer in stage.layers:
                layer(torch.full((2, WIDTH), i + 1.0)).square().mean().backward()
            optimizer.step()

        return stage, step, lambda path: stage.save(path, broken), lambda path: stage.load(path, broken)

    return start


def resume_in_four_stages(broken, world):
    check_resume(training(broken), world, resume_world_size=4)


@entry(
    "ckpt-local-layer-numbers",
    "class of Megatron-like pipelines",
    check="check_resume",
    judged="missed",
    why="as many stages load as have saved; resume_world_size=4 shows the bug",
    also=resume_in_four_stages,
)
def saves_layers_under_the_numbers_of_the_stage(broken, world):
    """Name the layers in a checkpoint by their places in the stage, so another number of stages reads wrong ones."""
    check_resume(training(broken), world)
