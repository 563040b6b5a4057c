"""A checkpoint of a model and its optimizer: ours beside those of torch; all wait for the disk.

``torch.distributed.checkpoint`` is torch's way for ranks to save together. ``torch.save`` by rank 0 is the floor: one
rank writes its own state, and the ranks agree on nothing. Ours has a checksum and the random streams of every rank, and
is loaded on all ranks or on none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

pytest.importorskip("xxhash", reason="a checkpoint needs xxhash: pip install 'pdlcheck[checkpoint]'")

from pdlcheck.primitives import latest_checkpoint, load_checkpoint, save_checkpoint

LAYERS, WIDTH = 8, 1024  # 33 MB, and as much momentum
NBYTES = 2 * 4 * LAYERS * (WIDTH + 1) * WIDTH

Trained = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture
def trained(device: torch.device) -> Trained:
    """Return a model after one step, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(1, WIDTH, device=device)).sum().backward()
    optimizer.step()
    return model, optimizer


def torch_save(folder: Path, trained: Trained) -> None:
    model, optimizer = trained
    if dist.get_rank() == 0:
        with open(folder / "plain.part", "wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "plain.part", folder / "plain.pt")
    dist.barrier()


def dcp_save(folder: Path, trained: Trained) -> None:
    weights, moments = get_state_dict(*trained)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")


def save(folder: Path, trained: Trained) -> None:
    model, optimizer = trained
    save_checkpoint(folder / "ours", 1, model=model, optimizer=optimizer)


def torch_load(folder: Path, trained: Trained) -> None:
    state = torch.load(folder / "plain.pt", weights_only=True)
    for part, loaded in zip(trained, (state["model"], state["optimizer"]), strict=True):
        part.load_state_dict(loaded)


def dcp_load(folder: Path, trained: Trained) -> None:
    model, optimizer = trained
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def load(folder: Path, trained: Trained) -> None:
    path = latest_checkpoint(folder / "ours")
    assert path is not None
    load_checkpoint(path, model=trained[0], optimizer=trained[1])


@pytest.mark.benchmark(group="checkpoints")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_save(rank_benchmark: Any, shared_tmp_path: Path, trained: Trained) -> None:
    others = {"torch.distributed.checkpoint": dcp_save, "torch.save": torch_save}
    rank_benchmark(save, shared_tmp_path, trained, nbytes=NBYTES, against=others)


@pytest.mark.benchmark(group="checkpoints")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_load(rank_benchmark: Any, shared_tmp_path: Path, trained: Trained) -> None:
    for saved in (save, dcp_save, torch_save):
        saved(shared_tmp_path, trained)
    others = {"torch.distributed.checkpoint": dcp_load, "torch.load": torch_load}
    rank_benchmark(load, shared_tmp_path, trained, nbytes=NBYTES, against=others)
