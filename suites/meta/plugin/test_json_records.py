"""The file of ``--pdl-json``: a line for each result, with the fields of failed checks."""

from __future__ import annotations

import json

import pytest

SOURCE = """
import pytest, torch, torch.distributed as dist
from pdlcheck.checks import check_all_reduce
from pdlcheck.errors import CheckFailed

def doubled(tensor):
    dist.all_reduce(tensor)
    tensor *= 3

def test_right(world):
    check_all_reduce(dist.all_reduce, [torch.ones(2)] * 2, world)

def test_wrong(world):
    check_all_reduce(doubled, [torch.ones(2), torch.full((2,), 4.0)], world)

@pytest.mark.world_size(2)
def test_on_ranks(rank):
    if rank == 1:
        raise CheckFailed("train: rank 1 holds nan", rank=rank, found=float("nan"), index=(0, 3))

@pytest.fixture
def broken():
    raise RuntimeError("no data")

def test_of_a_broken_fixture(broken):
    pass

def test_other():
    pass
"""


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_each_result_is_a_line_with_the_fields_of_the_failed_check(pytester, world):
    pytester.makepyfile(test_inner=SOURCE)
    (pytester.path / "out.json").write_text("of the session before\n")
    options = ("--world", world, "--pdl-json", "out.json", "-p", "no:cacheprovider")
    result = pytester.runpytest_inprocess(*options)
    result.assert_outcomes(passed=2, failed=2, errors=1)
    found = {record["nodeid"].partition("::")[2]: record for record in records(pytester.path / "out.json")}
    assert {name: (one["phase"], one["outcome"]) for name, one in found.items()} == {
        f"test_right[{world}]": ("call", "passed"),
        f"test_wrong[{world}]": ("call", "failed"),
        f"test_on_ranks[{world}-2]": ("call", "failed"),
        "test_of_a_broken_fixture": ("setup", "failed"),
        "test_other": ("call", "passed"),
    }
    assert {one["version"] for one in found.values()} == {1}
    right, wrong = found[f"test_right[{world}]"], found[f"test_wrong[{world}]"]
    assert (right["world"], right["error"], right["message"], right["check"]) == (world, None, None, None)
    assert wrong["error"] == "CheckFailed"
    assert wrong["message"].startswith("doubled: rank 0 holds 15 at (0,), the sum over ranks is 5")
    check = wrong["check"]
    known = {"subject": "doubled", "rank": 0, "index": [0], "found": 15.0, "expected": 5.0, "cause": None}
    assert {name: check[name] for name in known} == known
    assert check["case"] == f"world={world} world_size=2 shape=(2,) dtype=torch.float32"
    replay = f"pytest 'test_inner.py::test_wrong[{world}]' --world {world} --pdl-seed=0"
    assert (wrong["replay"], check["replay"], right["replay"]) == (replay, replay, None)
    assert right["conditions"]["check_all_reduce"]["more than two ranks"] is False
    assert (wrong["conditions"], found["test_other"]["conditions"]) == (None, None)
    on_ranks = found[f"test_on_ranks[{world}-2]"]
    assert (on_ranks["world"], on_ranks["world_size"]) == (world, 2)
    assert (on_ranks["check"]["rank"], on_ranks["check"]["found"], on_ranks["check"]["index"]) == (1, "nan", [0, 3])
    assert found["test_of_a_broken_fixture"]["error"] == "RuntimeError"
    assert found["test_of_a_broken_fixture"]["check"] is None


def test_a_file_that_cannot_be_written_is_an_error_of_usage(pytester):
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_inprocess("--pdl-json", "no/such/folder.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--pdl-json: cannot write no/such/folder.json: No such file or directory*"])


def test_workers_of_xdist_send_their_records(pytester):
    pytest.importorskip("xdist")
    pytester.makepyfile(test_inner=SOURCE)
    pytester.runpytest_subprocess("-n", "1", "-p", "xdist", "--world", "sim", "--pdl-json", "out.json")
    assert len(records(pytester.path / "out.json")) == 5
