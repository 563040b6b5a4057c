"""Measure `pdlcheck run` beside torchrun: one small training script, start-up included, in turns.

    python benchmarks/comparisons/script_runs.py
    python benchmarks/comparisons/script_runs.py --rounds 11 --ranks 4

``sim`` is `pdlcheck run -n 4 train.py`, ``gloo`` is the same with --world gloo, and ``watched`` is
`torchrun --nproc-per-node 4 -m pdlcheck run train.py`. The sides change their order from round to round. ``ratio`` is
the median, with its quartiles, of a side's time over that of plain torchrun in the same round. All sides must print the
same losses. The exit code is 1 if ``sim`` takes longer than torchrun.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
data, targets = torch.randn(256, 16), torch.randn(256, 1)
share = slice(dist.get_rank(), None, dist.get_world_size())
layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(50):
    loss = (model(data[share]) - targets[share]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach() / dist.get_world_size()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"step {step} loss {total.item():.4f}")
dist.barrier()
dist.destroy_process_group()
"""


def main() -> int:
    """Run the sides in turns; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    options = parser.parse_args()
    python, ranks = sys.executable, str(options.ranks)
    launch = [python, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    run = ["-m", "pdlcheck", "run"]
    sides = {
        "torchrun": [*launch, "train.py"],
        "sim": [python, *run, "-n", ranks, "train.py"],
        "gloo": [python, *run, "-n", ranks, "--world", "gloo", "train.py"],
        "watched": [*launch, *run, "train.py"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        for number in range(options.rounds):
            order = list(sides) if number % 2 else list(reversed(sides))
            losses = {name: _timed(sides[name], folder, seconds[name]) for name in order}
            if len(set(losses.values())) != 1:
                raise SystemExit(f"the sides printed other losses: {losses}")
    load = os.getloadavg()[0]
    for name, taken in seconds.items():
        ratios = [own / torchs for own, torchs in zip(taken, seconds["torchrun"], strict=True)]
        low, _, high = quantiles(ratios, n=4)
        print(f"{name:9} {median(taken):6.2f} s  ratio {median(ratios):.2f} ({low:.2f} .. {high:.2f})")
    print(f"{options.ranks} ranks, {options.rounds} rounds, load {load:.1f}")
    return int(median(seconds["sim"]) > median(seconds["torchrun"]))


def _timed(command: list[str], folder: str, taken: list[float]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    taken.append(time.perf_counter() - began)
    return " ".join(re.findall(r"loss \S+", done.stdout))


if __name__ == "__main__":
    raise SystemExit(main())
