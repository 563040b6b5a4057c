"""Silent faults of a transformer under tensor, sequence, pipeline and data parallelism: the module that is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pdlcheck
from pdlcheck.tracing import compare_traces
from pdlcheck.tracing.report import as_text
from suites.meta.tracing.transformer import (
    RATE,
    Plan,
    Stage,
    mapping_of,
    train_parallel,
    train_whole,
    whole,
)

DTYPES = [torch.float32, torch.bfloat16]
STEPS = 2

FAULTS = {  # fault -> module, direction, and a part of the cause; they are of the kinds that TTrace reports
    "embedding mask": ("embedding", "forward", ""),
}


def record_whole(directory: Path, dtype: torch.dtype, perturb: int | None = None) -> None:
    model = whole(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with pdlcheck.trace(model, optimizer, directory, steps=STEPS, perturb=perturb):
        train_whole(model, optimizer, STEPS)


def record_parallel(directory: Path, dtype: torch.dtype, fault: str) -> None:
    plan = Plan(fault)
    model = whole(dtype)
    stage = Stage(plan).to(dtype)
    stage.load(model)
    optimizer = torch.optim.SGD(stage.parameters(), lr=RATE)
    with pdlcheck.trace(stage, optimizer, directory, steps=STEPS, mapping=mapping_of(plan, stage)):
        train_parallel(stage, plan, optimizer, STEPS)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def trusted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    record_whole(folder / "trusted", request.param)
    record_whole(folder / "noisy", request.param, perturb=1)
    return request.param, folder
