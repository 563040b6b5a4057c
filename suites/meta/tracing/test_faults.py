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

DTYPES = [torch.float32, torch.bfloat16]
SUM_OVER = "the sum over the {} ranks is the trusted tensor"

FAULTS = {  # fault -> module, direction, part of the cause; kinds of faults that TTrace reports
    "embedding mask": ("embedding", "forward", "rows of the last dimension are wrong"),
    "no sum of rows": ("layers.0.o", "forward", "unknown"),
    "sum over the wrong group": ("layers.0.o", "forward", "unknown"),
    "bias on each rank": ("layers.0.o", "forward", "unknown"),
    "scale of attention": ("layers.0.o", "forward", "unknown"),
    "labels of another micro-batch": ("head", "backward", "unknown"),
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


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def traces(request, tmp_path_factory):
    """Return a dtype and the folder with the traces of the trusted run."""
    folder = tmp_path_factory.mktemp("traces")
    record_whole(folder / "trusted", request.param, 2)
    record_whole(folder / "noisy", request.param, 2, perturb=1)
    return request.param, folder


def compared(traces, steps: int, fault: str, is_estimated: bool = True):
    dtype, folder = traces
    get_world("sim").run(record_parallel, folder / "parallel", dtype, steps, fault, world_size=8)
    return compare_traces(folder / "trusted", folder / "parallel", perturbed=[folder / "noisy"] * is_estimated)


@pytest.mark.parametrize("is_estimated", [True, False], ids=["perturbed", "default"])
def test_the_right_run_agrees_in_every_step(traces, is_estimated):
    found = compared(traces, 2, "", is_estimated)
    assert found.first is None, as_text(found)
    assert found.steps == 2
    assert found.nearest < 0.9


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_wrong_module_is_named(traces, fault):
    module, direction, cause = FAULTS[fault]
    found = compared(traces, 1, fault)
    assert found.first is not None
    report = as_text(found)
    assert f"the traces part in step 1 at {module} (" in report, report
    assert f"), {direction}\n" in report, report
    assert cause in report, report
