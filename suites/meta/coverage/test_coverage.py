"""Features on simulated ranks give the result of a single process; the matrix reports every deviation."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pdlcheck.errors import Deadlock, Unsupported

from .. import coverage
from ..clone import ROOT
from ..torchs_limits import NO_POWER_SGD
from . import AREAS, FEATURES, SEMANTICS, Feature, measure
from .cell import relative_error
from .entry import everywhere, mine, of_all
from .store import _rounds

PAGE, COMMAND = ROOT / "docs" / "coverage.md", ROOT / "ci" / "matrix.py"
NAMES = [feature.name for feature in FEATURES]


def _on_this_machine(feature):
    marks = [NO_POWER_SGD] if "PowerSGD" in feature.name else []
    return pytest.param(feature, id=re.sub(r"\W+", "-", feature.name), marks=marks)


@pytest.mark.parametrize("column", ["rendezvous", "nccl", "gloo"])
@pytest.mark.parametrize("feature", [_on_this_machine(feature) for feature in FEATURES])
def test_a_feature_gives_what_a_single_process_computes(feature, column):
    cell = measure(feature, column)
    assert not cell.failed, cell.note


# -- completeness ----------------------------------------------------------------------------------


def test_names_are_unique():
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("reduce_op", dist.ReduceOp.RedOpType.__members__)
def test_every_reduce_op_has_a_row(reduce_op):
    assert f"all_reduce {reduce_op}" in NAMES


KINDS = re.compile(r"all_|barrier|batch_|broadcast|gather|i?recv|i?send|monitored_|reduce|scatter")
NO_OPERATIONS = {"reduce_op"}  # the old name of a class


@pytest.mark.parametrize(
    "operation", [name for name in distributed_c10d.__all__ if KINDS.match(name) and name not in NO_OPERATIONS]
)
def test_every_operation_of_torch_has_a_row(operation):
    assert any(re.search(rf"\b{operation}\b", name) for name in NAMES)


@pytest.mark.parametrize(
    "word",
    [
        "any-source", "async_op", "coalescing manager", "static_graph", "gradient_as_bucket_view", "no_sync", "join",
        "find_unused_parameters", "fp16_compress_hook", "bf16_compress_hook", "PowerSGD", "PostLocalSGD", "ZeRO",
        "FSDP1", "FSDP2", "HSDP", "DTensor", "tensor parallel", "DCP", "functional", "GPipe", "1F1B",
        "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "tags", "sub-group", "store",
    ],
)  # fmt: skip
def test_a_subject_has_a_row(word):
    assert any(word in name for name in NAMES)


# -- a cell can fail -------------------------------------------------------------------------------


def sum_of_all(forget_rank=None):
    x = mine(3)
    if dist.get_rank() == forget_rank:
        x.zero_()
    dist.all_reduce(x)
    return x


RIGHT = Feature("sum", sum_of_all, lambda: everywhere(sum(of_all(3))))
BROKEN = {
    "a program without one rank": (
        replace(RIGHT, program=partial(sum_of_all, forget_rank=2)),
        r"rank 0 is off by \de-01 of its largest element, 8e-06 is allowed",
    ),
    "a reference without one rank": (
        replace(RIGHT, alone=lambda: everywhere(sum(of_all(3)[1:]))),
        r"rank 0 is off by \de-01 of its largest element, 8e-06 is allowed",
    ),
    "a reference that differs on one rank": (
        replace(RIGHT, alone=lambda: [*RIGHT.alone()[:3], -RIGHT.alone()[3]]),
        r"rank 3 is off by 2e\+00",
    ),
    "an error": (replace(RIGHT, program=lambda: dist.recv(mine(3), dist.get_rank())), r"Deadlock: no rank can go on"),
    "an error in the reference": (replace(RIGHT, alone=lambda: 1 / 0), r"ZeroDivisionError: division by zero"),
    "a reference that communicates": (
        replace(RIGHT, alone=lambda: everywhere(dist.get_rank())),
        r"Default process group has not been initialized",
    ),
    "a right error that does not come": (
        replace(RIGHT, errors={"rendezvous": Unsupported}),
        r"Unsupported did not come",
    ),
    "another error than the right one": (
        replace(RIGHT, program=lambda: dist.recv(mine(3), dist.get_rank()), errors={"rendezvous": Unsupported}),
        r"Deadlock: no rank can go on",
    ),
    "a barrier that holds nobody": (
        Feature("barrier", partial(_rounds, lambda group: None), partial(everywhere, "held"), numerics=False),
        r"\d of 4 had entered",
    ),
}


@pytest.mark.parametrize(("feature", "note"), BROKEN.values(), ids=BROKEN)
def test_a_broken_feature_fails(feature, note):
    cell = measure(feature, "rendezvous")
    assert cell.says == "FAIL"
    assert re.search(note, cell.note)


def test_the_right_twins_pass():
    assert measure(RIGHT, "rendezvous") == coverage.Cell("=")
    barrier = Feature("barrier", partial(_rounds, dist.barrier), partial(everywhere, "held"), numerics=False)
    assert measure(barrier, "rendezvous") == coverage.Cell("runs")
    blocked = replace(BROKEN["an error"][0], errors={"rendezvous": Deadlock})
    assert measure(blocked, "rendezvous").says == "Deadlock"


def test_the_semantics_of_a_column_are_those_of_the_run():
    def says(name):
        (feature,) = (each for each in FEATURES if each.name == name)
        return [measure(feature, column).says for column in SEMANTICS]

    assert {column for column, cell in zip(SEMANTICS, says("all_reduce SUM"), strict=True) if cell != "="} == {
        "reduce reversed", "reduce random", "nccl", "gloo"
    }  # fmt: skip
    ends = {column for column, cell in zip(SEMANTICS, says("head-to-head send"), strict=True) if cell == "="}
    assert ends == {"eager", "buffered"}
    assert says("any-source receive")[list(SEMANTICS).index("nccl")] == "refused"


X = torch.tensor([1.0, 2.0])
DIFFERENT = {
    "a value": ([X], [X + 0.01], "rank 0 is off by 5e-03"),
    "not a number": ([X], [X / 0 * 0], "rank 0 is off by nan"),
    "a dtype": ([X], [X.double()], "float32 (2,), a single process has float64 (2,)"),
    "a shape": ([X], [X[:1]], "float32 (2,), a single process has float32 (1,)"),
    "an integer": ([X.long()], [X.long() + 1], "rank 0 is [1, 2], a single process has [2, 3]"),
    "a type": ([1], [True], "rank 0 is 1, a single process has True"),
    "bytes": ([b"1"], [b"2"], "rank 0 is b'1'"),
    "None": ([X], [None], "a single process has None"),
    "keys": ([{"a": X}], [{"b": X}], "rank 0 has the keys ['a']"),
    "a deep one": ([{"a": [X, X]}], [{"a": [X, 2 * X]}], "rank 0['a'][1] is off by 5e-01"),
    "a missing rank": ([X], [X, X], "the result has 1 items, a single process 2"),
}


@pytest.mark.parametrize(("found", "wanted", "told"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_told(found, wanted, told):
    with pytest.raises(AssertionError, match=re.escape(told)):
        relative_error(found, wanted)
    assert relative_error(found, found) is None
    assert relative_error(wanted, wanted) is None


def test_a_rounding_is_no_failure_but_told():
    assert relative_error([X], [X * (1 + 1e-6)]) == pytest.approx(1e-6, rel=0.1)
    assert relative_error([X.half()], [X.half() * 1.001], rtol=1e-2) > 0


# -- the command and its page ----------------------------------------------------------------------


@pytest.fixture
def command():
    if not COMMAND.exists():
        pytest.skip("needs ci/matrix.py: run the suites in a clone of the repository")
    spec = importlib.util.spec_from_file_location("_matrix", COMMAND)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", list(__import__("sys").path))
        patch.setattr("logging.disable", lambda level: None)
        spec.loader.exec_module(module)
        yield module


def test_the_command_fails_if_a_cell_does(command, capsys, monkeypatch):
    broken, _ = BROKEN["a program without one rank"]
    monkeypatch.setattr(command.coverage, "AREAS", {"sums": [RIGHT], "others": [replace(broken, name="broken")]})
    assert command.main(["-k", "sums"]) == 0
    assert "FAIL [" not in capsys.readouterr().out
    assert command.main([]) == 1
    told = capsys.readouterr()
    assert re.search(r"\| broken +\| FAIL \[1\]", told.out)
    assert "\n1. rank 0 is off by " in told.out
    assert f"{len(SEMANTICS)} FAIL" in told.out
    assert "broken ..." in told.err


def test_the_command_tells_of_a_word_that_no_feature_has(command, capsys):
    with pytest.raises(SystemExit):
        command.main(["-k", "no such feature"])
    assert "no feature has 'no such feature'" in capsys.readouterr().err


def _rows(text):
    lines = text.partition("\n## ")[2].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


@pytest.mark.skipif(not PAGE.exists(), reason="needs docs/coverage.md: run the suites in a clone of the repository")
def test_the_page_names_the_features_of_the_code():
    text = PAGE.read_text()
    rows = [row for row in _rows(text) if row[0] not in ("feature", "---")]
    of_newer_torch = ("gather_single", "gather_into_tensor")  # the page is made with the torch of constraints.txt
    names = [name for name in NAMES if not name.startswith(of_newer_torch)]
    assert [row[0] for row in rows] == names, "run python ci/matrix.py --write"
    assert all(row[1:] == list(SEMANTICS) for row in _rows(text) if row[0] == "feature")
    assert not any(cell.startswith("FAIL") for row in rows for cell in row)
    assert text.count("\n## ") == len(AREAS)
