"""check_resumed_run rejects programs with a loop of their own that lose something at a stop."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_resumed_run
from pdlcheck.errors import CheckFailed

STEPS = 6
DATA = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))


class Program:
    """A data-parallel program of two epochs, which writes one file for each rank when it stops."""

    loses: tuple[str, ...] = ()
    reseeds, reads_file_of_rank_0 = False, False

    def __init__(self, folder):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.losses, self.taken = [], 0
        self.file = folder / f"rank-{0 if self.reads_file_of_rank_0 else dist.get_rank()}.pt"

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def resume(self):
        if not self.file.exists():
            return
        state = torch.load(self.file)
        for name, part in self.parts().items():
            if name not in self.loses:
                part.load_state_dict(state[name])
        if "scheduler" in self.loses:
            self.optimizer.param_groups[0]["lr"] = 0.1
        self.taken = 0 if "steps" in self.loses else state["taken"]
        if "random" not in self.loses:
            torch.set_rng_state(state["random"])

    def save(self):
        state = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save(state | {"taken": self.taken, "random": torch.get_rng_state()}, self.file)
        dist.barrier()

    def batch(self):
        first = 0 if "position" in self.loses else self.begins_at
        return DATA[4 * ((self.taken - self.begins_at + first) % 3) + 12 * (dist.get_rank() % 2) :][:4]

    def train(self, stop_after):
        self.begins_at = self.taken
        while self.taken < (stop_after or STEPS):
            self.optimizer.zero_grad()
            loss = (self.model(self.batch()) - 1).square().mean()
            loss.backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(loss.item())
            self.taken += 1

    def returned(self):
        return self.parts() | {"losses": self.losses}

    @classmethod
    def run(cls, folder, stop_after):
        program = cls(folder)
        torch.manual_seed(7 + dist.get_rank() if not folder.name.startswith("x") else 0)
        program.resume()
        program.train(stop_after)
        program.save()
        return program.returned()


def broken(program=Program, **changes):
    return type("Broken", (program,), changes).run


def cause_of(run, world, **more):
    with pytest.raises(CheckFailed, match=r"^run: stopped after ") as caught:
        check_resumed_run(run, world, **{"stop_after": 2, **more})
    return caught.value


@pytest.mark.parametrize("stop_after", [2, 3])
def test_a_program_that_saves_everything_passes(world, stop_after):
    check_resumed_run(Program.run, world, stop_after=stop_after)
