"""The plugin of pdlcheck beside other plugins and tools of pytest's users."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from pdlcheck.harness.collection.devices import divide_among_workers

from ..conftest import HEAD
from ..needs_mpi import needs_mpi

MEASURED = """
import torch.distributed as dist

def where():
    if dist.get_rank() == 0:
        return "zero"
    return "one"

def late(x):
    for _ in range(x):
        pass
    return x

def never():
    return 1
"""


@pytest.mark.slow
def test_pytest_cov_counts_what_only_ranks_ran(run, pytester):
    result = run(
        """
import measured

@W
def test_body(rank):
    measured.where()

def test_function(world):
    world.run(measured.late, 2, world_size=2)

@W
def test_a_rank_dies(rank):
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()
""",
        "--cov=measured",
        "--cov-branch",
        "--cov-report=json",
        new_process=True,
        measured=MEASURED,
    )
    result.assert_outcomes(passed=2, failed=1)
    _all_but_one_line_is_covered(pytester.path)


@pytest.mark.slow
def test_pytest_cov_counts_functions_after_which_the_ranks_are_replaced(run, pytester):
    program = """
    import torch.distributed as dist

    def main():
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        dist.destroy_process_group()
        return rank

    def one_leaves():
        if dist.get_rank():
            dist.destroy_process_group()
        else:
            return "stays"

    def fails():
        dist.destroy_process_group()
        raise ValueError("on purpose")
    """
    result = run(
        """
import program

def test_function(world):
    assert world.run(program.main, world_size=2) == [0, 1]
    assert world.run(program.one_leaves, world_size=2) == ["stays", None]
    with pytest.raises(ValueError, match="on purpose"):
        world.run(program.fails, world_size=2)
""",
        "--cov=program",
        "--cov-report=json",
        new_process=True,
        program=program,
    )
    result.assert_outcomes(passed=1)
    assert json.loads((pytester.path / "coverage.json").read_text())["files"]["program.py"]["missing_lines"] == []


def _all_but_one_line_is_covered(path):
    report = json.loads((path / "coverage.json").read_text())["files"]["measured.py"]
    assert (report["missing_lines"], report["missing_branches"]) == ([14], []), report
    assert [left.name for left in path.glob(".coverage*")] == [".coverage"]


@pytest.mark.slow
def test_workers_of_xdist_have_ranks_of_their_own_and_measure_coverage(run, pytester):
    result = run(
        """
import measured

@pytest.fixture(scope="session", autouse=True)
def everything():
    yield
    if dist.is_initialized():
        name = f"end-{os.environ['PYTEST_XDIST_WORKER']}-{dist.get_world_size()}-{dist.get_rank()}"
        open(name, "x").close()  # an error if it is done twice

@W
@pytest.mark.parametrize("i", range(8))
def test_many(i, rank, tmp_path):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == 1
    measured.where()

@pytest.mark.world_size(3)
@pytest.mark.parametrize("i", range(2))
def test_more(i, world_size):
    measured.late(world_size)

@W
def test_output(rank):
    print(f"said by {rank}")
    assert rank == 0
""",
        "-n2",
        "--cov=measured",
        "--cov-branch",
        "--cov-report=json",
        new_process=True,
        measured=MEASURED,
    )
    result.assert_outcomes(passed=10, failed=1)
    ended = {path.name for path in pytester.path.glob("end-*")}
    assert {name for name in ended if name.endswith("0")}, "each pool has torn its session down"
    _all_but_one_line_is_covered(pytester.path)
    result.stdout.fnmatch_lines(["*Captured stdout call ?rank 1?*", "said by 1"])


def test_each_worker_sees_its_own_devices(tmp_path):
    def seen(worker, count, **environment):
        for number in range(4):
            (tmp_path / str(number)).mkdir(exist_ok=True)
        config = SimpleNamespace(workerinput={"workerid": f"gw{worker}", "workercount": count})
        divide_among_workers(config, environment, tmp_path)
        return environment.get("CUDA_VISIBLE_DEVICES")

    assert [seen(worker, 2) for worker in range(2)] == ["0,1", "2,3"]
    assert [seen(worker, 2, CUDA_VISIBLE_DEVICES="7,GPU-a,5") for worker in range(2)] == ["7,GPU-a", "5"]
    assert [seen(worker, 3, CUDA_VISIBLE_DEVICES="1") for worker in range(3)] == ["1"] * 3
    untouched = {}
    divide_among_workers(SimpleNamespace(), untouched, tmp_path)
    assert untouched == {}


def test_pytest_randomly_reorders_and_seeds_without_making_ranks_alike(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS")  # it disables this plugin for the other tests
    pytester.makepyfile(
        test_inner=HEAD
        + """
@W
@pytest.mark.parametrize("i", range(6))
def test_streams(i, rank):
    drawn = [None, None]
    dist.all_gather_object(drawn, (random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert all(x != y for x, y in zip(*drawn))
    print("drawn", drawn[0][:2], i)
"""
    )
    lines = []
    for _ in range(2):
        result = pytester.runpytest_inprocess("--world", "gloo", "--randomly-seed=3", "-rP")
        result.assert_outcomes(passed=6)
        lines.append([line for line in result.outlines if line.startswith("drawn")])
    assert lines[0] == lines[1]
    assert len(set(lines[0])) == 6
    order = [line.split()[-1] for line in lines[0][::2]]
    assert order != sorted(order)


def test_last_failed_and_stepwise(pytester):
    source = """
@W
def test_good(): pass

@W
def test_bad(rank): assert rank == 0

@W
def test_worse(rank): assert rank == 1
"""
    pytester.makepyfile(HEAD + source)  # with the cache, which `run` disables
    pytester.runpytest_inprocess("--world", "gloo", "--sw").assert_outcomes(passed=1, failed=1)
    pytester.runpytest_inprocess("--world", "gloo", "--lf").assert_outcomes(failed=1, deselected=0)


@pytest.mark.parametrize(
    "world",
    [
        pytest.param("sim", marks=pytest.mark.slow),
        "gloo",
        pytest.param("mpi", marks=[pytest.mark.slow, needs_mpi]),
    ],
)
def test_pytest_benchmark_tells_what_each_rank_has_measured(run, pytester, monkeypatch, world):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # in xdist workers pytest-benchmark measures nothing
    result = run(
        """
pytestmark = W

def test_steps(benchmark, rank):
    benchmark.extra_info["rank"] = rank
    benchmark.pedantic(dist.barrier, rounds=3)

@pytest.mark.benchmark(group="mine")
def test_alone(benchmark, rank):
    if rank == 1:
        benchmark(time.sleep, 0.001)

@pytest.mark.xfail(strict=True)
def test_fails(benchmark, rank): benchmark(int, "no number")

def test_none(benchmark): pass
""",
        "--benchmark-json=found.json",
        world=world,
        new_process=True,
    )
    assert result.ret == 0
    found = {one["name"]: one for one in json.loads((pytester.path / "found.json").read_text())["benchmarks"]}
    steps = [f"test_steps[{world}-2] [rank {rank}]" for rank in range(2)]
    assert sorted(found) == sorted([f"test_alone[{world}-2] [rank 1]", *steps])
    assert [(found[name]["stats"]["rounds"], found[name]["extra_info"]) for name in steps] == [
        (3, {"rank": rank}) for rank in range(2)
    ]
    alone = found[f"test_alone[{world}-2] [rank 1]"]
    assert alone["group"] == "mine"
    assert alone["stats"]["min"] > 0.001
    result.stdout.fnmatch_lines([f"test_steps*{world}-2* *rank [01]*"])
