"""A checkpoint of a model and its optimizer: ours beside those of torch, which wait for the disk too.

``torch.distributed.checkpoint`` is what ranks save together with; ``torch.save`` by rank 0 is the floor: one rank
writes its own state, and nobody agrees on anything. Ours has a checksum and the random streams of every rank, and is
loaded on all ranks or none. The ways take turns; a row states the slowest rank's median.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from pdlcheck.bench import slowest_s
from pdlcheck.primitives import latest_checkpoint, load_checkpoint, save_checkpoint
from pdlcheck.worlds import Ranks

LAYERS, WIDTH = 8, 1024  # 33 MB, and as much of momentum


def timed_checkpoints(folder: str, turns: int) -> dict[str, list[float]]:
    """Seconds of each save and load on this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(1, WIDTH)).sum().backward()
    optimizer.step()
    plain = Path(folder, "plain.pt")

    def torch_save() -> None:
        if dist.get_rank() == 0:
            with open(f"{plain}.part", "wb") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{plain}.part", plain)
        dist.barrier()

    def torch_load() -> None:
        state = torch.load(plain, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def load() -> None:
        path = latest_checkpoint(Path(folder, "ours"))
        assert path is not None
        load_checkpoint(path, model=model, optimizer=optimizer)

    def dcp_save() -> None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=Path(folder, "dcp"))

    def dcp_load() -> None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=Path(folder, "dcp"))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    ways = {
        "save": lambda: save_checkpoint(Path(folder, "ours"), 1, model=model, optimizer=optimizer),
        "dcp_save": dcp_save,
        "torch_save": torch_save,
        "load": load,
        "dcp_load": dcp_load,
        "torch_load": torch_load,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


@pytest.mark.benchmark(group="checkpoints")
def test_checkpoint(benchmark: Any, ranks: Ranks, full: bool) -> None:
    found: list[dict[str, list[float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        turns = 15 if full else 5
        benchmark.pedantic(lambda: found.extend(ranks.run(timed_checkpoints, folder, turns)), rounds=1)
    seconds = {name: slowest_s([rank[name] for rank in found]) for name in found[0]}
    benchmark.extra_info |= {f"{name}_s": value for name, value in seconds.items()}
    benchmark.extra_info |= {"world_size": ranks.world_size, "nbytes": 2 * 4 * LAYERS * (WIDTH + 1) * WIDTH}
    benchmark.extra_info["row"] = (
        f"checkpoint of 33 MB and its momentum, {ranks.world_size} ranks, ms: save {seconds['save'] * 1e3:.0f}, "
        f"torch.distributed.checkpoint {seconds['dcp_save'] * 1e3:.0f}, torch.save {seconds['torch_save'] * 1e3:.0f}; "
        f"load {seconds['load'] * 1e3:.0f}, torch.distributed.checkpoint {seconds['dcp_load'] * 1e3:.0f}, torch.load "
        f"{seconds['torch_load'] * 1e3:.0f}"
    )
