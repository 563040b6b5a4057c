"""Measure the cost of pdlcheck.watch: the same training with it and without, in turns, on two gloo processes.

    python benchmarks/comparisons/watch_overhead.py
    python benchmarks/comparisons/watch_overhead.py --rounds 21 --every 100

A turn is ``every`` steps of DDP and SGD with momentum, so it has one comparison. The slowest rank of a turn counts. The
two sides change their order from round to round. ``ratio`` is the median of the ratios of their times round by round,
with its quartiles. ``watcher`` is the processor time in the watcher's hooks during a turn, and its part of the
processor time of the turn, which other load disturbs less. The exit code is 1 if that part is 2 % or more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pdlcheck
from pdlcheck.primitives import FunctionNet, function_samples
from pdlcheck.worlds import get_world

TARGET = 0.02
SIDES = ("without", "with")


def function_network() -> tuple[nn.Module, Tensor, Tensor]:
    inputs, targets = function_samples(2000)
    return FunctionNet(), inputs, targets


def model_of_33_MB() -> tuple[nn.Module, Tensor, Tensor]:
    layers = [one for _ in range(8) for one in (nn.Linear(1024, 1024), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(128, 1024), torch.randn(128, 1024)


MODELS = {"function network": function_network, "33 MB": model_of_33_MB}


class Training:
    """A training of a rank, with or without a watcher."""

    def __init__(self, name: str, every: int | None) -> None:
        torch.manual_seed(0)
        model, inputs, targets = MODELS[name]()
        share = slice(dist.get_rank(), None, dist.get_world_size())
        self.inputs, self.targets = inputs[share], targets[share]
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.in_hooks = 0.0
        if every is not None:
            self.optimizer.register_step_pre_hook(self._clock(-1))
            self.optimizer.register_step_post_hook(self._clock(-1))
            pdlcheck.watch(self.model, self.optimizer, every=every)
            self.optimizer.register_step_pre_hook(self._clock(1))
            self.optimizer.register_step_post_hook(self._clock(1))

    def _clock(self, sign: int) -> Callable[..., None]:
        """Return a hook that adds the time to what the hooks between two such take."""

        def add(*arguments: object) -> None:
            self.in_hooks += sign * time.process_time()

        return add

    def turn(self, steps: int) -> tuple[float, float]:
        """Take steps, and return their seconds and their processor seconds."""
        dist.barrier()
        start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(self.inputs), self.targets).backward()
            self.optimizer.step()
        return time.perf_counter() - start[0], time.process_time() - start[1]


def on_rank(name: str, every: int, rounds: int) -> list[dict[str, float]]:
    """Return the seconds of both sides, and of the watcher, for each round."""
    sides = {"without": Training(name, None), "with": Training(name, every)}
    found = []
    for number in range(rounds + 1):  # the first round warms up, and has the comparison before the first step
        sides["with"].in_hooks = 0.0
        times = {side: sides[side].turn(every) for side in sorted(SIDES, reverse=number % 2 == 0)}
        row = {side: seconds for side, (seconds, _) in times.items()}
        found.append({**row, "watcher": sides["with"].in_hooks, "share": sides["with"].in_hooks / times["with"][1]})
    return found[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=100, help="steps between comparisons; default: %(default)s")
    options = parser.parse_args()
    world = get_world("gloo", watch=False, threads_per_rank=1, timeout_s=3600)
    held = True
    for name in MODELS:
        ranks = world.run(on_rank, name, options.every, options.rounds, world_size=2)
        rounds = [{key: max(rank[key] for rank in one) for key in one[0]} for one in zip(*ranks, strict=True)]
        ratios = quantiles([one["with"] / one["without"] for one in rounds], n=4)
        share = median(one["share"] for one in rounds)
        step_ms = 1e3 * median(one["without"] for one in rounds) / options.every
        watcher_ms = 1e3 * median(one["watcher"] for one in rounds)
        print(
            f"{name:16}  step {step_ms:6.2f} ms  watcher {watcher_ms:6.2f} ms, {share:.2%} of a turn  "
            f"ratio {ratios[1]:.4f} ({ratios[0]:.4f} to {ratios[2]:.4f})"
        )
        held = held and share < TARGET
    print(f"{options.rounds} rounds, every={options.every}, load {os.getloadavg()[0]:.1f}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
