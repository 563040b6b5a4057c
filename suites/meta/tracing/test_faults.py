"""Silent faults of a transformer under tensor, sequence, pipeline and data parallelism: the module that is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pdlcheck
from pdlcheck.tracing import compare_traces
from pdlcheck.tracing.report import as_text
from pdlcheck.worlds import get_world
from suites.meta.tracing.transformer import RATE, Plan, Stage, mapping_of, train_parallel, train_whole, whole

DTYPES, NAMES = [torch.float32, torch.bfloat16], ["float32", "bfloat16"]
BOTH = {"no sum in backward"}  # the quick tests have them in both dtypes
SUM_OVER = "the sum over the {} ranks is the trusted tensor"

FAULTS = {  # fault -> module, direction, part of the cause; kinds of faults that TTrace reports
    "embedding mask": ("embedding", "forward", "rows of the last dimension are wrong"),
    "sum over the wrong group": ("layers.0.o", "forward", "unknown"),
    "bias on each rank": ("layers.0.o", "forward", "unknown"),
    "scale of attention": ("layers.0.o", "forward", "unknown"),
    "loss not divided": ("head", "backward", "2 times the trusted tensor"),
    "no sum in backward": ("layers.1.up", "backward", "unknown"),
    "recomputed from another input": ("layers.1.up", "backward", "unknown"),
    "gradients of micro-batches exchanged": ("layers.1", "backward", "a right part at a wrong place"),
    "norms not synchronised": ("layers.1.norm2", "gradient to the optimizer", SUM_OVER.format("tp")),
    "embedding not tied": ("embedding", "gradient to the optimizer", SUM_OVER.format("pp")),
    "left out of data parallel": ("layers.1.k", "gradient to the optimizer", "the mean over the dp ranks"),
    "sum over data parallel": ("norm", "gradient to the optimizer", "2 times the trusted tensor"),
    "learning rate of a stage": ("embedding", "update", "learning rate"),
    "update lost": ("layers.0.up", "update", "did not change"),
}


def record_whole(directory: Path, dtype: torch.dtype, steps: int, perturb: int | None = None) -> None:
    model = whole(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with pdlcheck.trace(model, optimizer, directory, steps=steps, perturb=perturb):
        train_whole(model, optimizer, steps)


def record_parallel(directory: Path, dtype: torch.dtype, steps: int, fault: str) -> None:
    plan = Plan(fault)
    stage = Stage(plan).to(dtype)
    stage.load(whole(dtype))
    optimizer = torch.optim.SGD(stage.parameters(), lr=RATE)
    with pdlcheck.trace(stage, optimizer, directory, steps=steps, mapping=mapping_of(plan, stage)):
        train_parallel(stage, plan, optimizer, steps)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Return a function: the folder with the traces of the trusted run, for a dtype."""
    folders: dict[torch.dtype, Path] = {}

    def folder_of(dtype: torch.dtype) -> Path:
        if dtype not in folders:
            folders[dtype] = tmp_path_factory.mktemp("traces")
            record_whole(folders[dtype] / "trusted", dtype, 2)
            record_whole(folders[dtype] / "noisy", dtype, 2, perturb=1)
        return folders[dtype]

    return folder_of


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_the_right_run_agrees_in_every_step(traces, dtype):
    folder = traces(dtype)
    get_world("sim").run(record_parallel, folder / "right", dtype, 2, "", world_size=8)
    found = compare_traces(folder / "trusted", folder / "right", perturbed=folder / "noisy")
    assert found.first is None, as_text(found)
    assert (found.steps, found.is_estimated) == (2, True)
    by_default = compare_traces(folder / "trusted", folder / "right")
    assert by_default.first is None, as_text(by_default)


CASES = [
    pytest.param(
        dtype, fault, id=f"{name}-{fault}", marks=[] if name == "float32" or fault in BOTH else pytest.mark.slow
    )
    for dtype, name in zip(DTYPES, NAMES, strict=True)
    for fault in FAULTS
]


@pytest.mark.parametrize(("dtype", "fault"), CASES)
def test_the_first_wrong_module_is_named(traces, dtype, fault):
    module, direction, cause = FAULTS[fault]
    folder = traces(dtype)
    get_world("sim").run(record_parallel, folder / "parallel", dtype, 1, fault, world_size=8)
    found = compare_traces(folder / "trusted", folder / "parallel", perturbed=folder / "noisy")
    report = as_text(found)
    assert f"the traces part in step 1 at {module} (" in report, report
    assert f"), {direction}\n" in report, report
    assert cause in report, report
