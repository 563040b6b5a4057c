"""The marker ``schedules`` and the option ``--schedule``, from outside."""

from __future__ import annotations

import re
import shlex

import pytest

# Inner runs forget the modules that they import, so modules with state must be imported before.
import pdlcheck.item_runners.processes.items
import pdlcheck.item_runners.simulated.items
import pdlcheck.strategies  # noqa: F401

HEAD = """
import pytest, torch, torch.distributed as dist
from hypothesis import given, settings, strategies as st
from pdlcheck.strategies import schedules

runs = []

def first_of(rank, world_size):
    if rank:
        dist.send(torch.zeros(1), 0)
        return 1
    return [dist.recv(torch.zeros(1)) for _ in range(world_size - 1)][0]
"""
RACE = (
    HEAD
    + """
@pytest.mark.schedules(50)
@pytest.mark.world_size(4)
def test_race(rank, world_size, tmp_path):
    assert list(tmp_path.iterdir()) == []  # fixtures are new for each schedule
    (tmp_path / "used").touch()
    assert first_of(rank, world_size) == 1, "another rank came first"
"""
)


@pytest.fixture
def run(pytester):
    def run(source, *options, world="sim"):
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess("--world", world, "-p", "no:cacheprovider", *options)

    return run


def replay_command(result):
    (command,) = [line for line in result.outlines if line.startswith("pytest ")]
    return shlex.split(command)[1:]


def failure_lines(result):
    return [line for line in result.outlines if line.startswith("E ") and "schedule " not in line]


@pytest.mark.slow
def test_the_marker_finds_the_schedule_and_prints_the_line_that_replays_it_twenty_times(run, pytester):
    found = run(RACE)
    found.assert_outcomes(failed=1)
    found.stdout.re_match_lines([r".*schedule \d+ of 50 fails first \(\S+, \d+ switches\); 1 of them"])
    command = replay_command(found)
    assert re.fullmatch(r"--schedule=replay:\d+r[23]", command[-1])
    for _ in range(20):
        again = pytester.runpytest_inprocess(*command, "-p", "no:cacheprovider")
        again.assert_outcomes(failed=1)
        assert failure_lines(again) == failure_lines(found)
        assert replay_command(again) == command


def test_a_test_that_is_right_under_every_schedule_passes_once(run):
    run(RACE.replace('== 1, "', 'in range(1, 4), "')).assert_outcomes(passed=1)


def test_the_marker_runs_once_on_processes(run):
    run(RACE.replace("world_size(4)", "world_size(2)"), world="gloo").assert_outcomes(passed=1)


def test_the_default_schedule_of_a_failure_replays_from_its_seed(run, pytester):
    source = RACE.replace("@pytest.mark.schedules(50)\n", "")
    seed = next(seed for seed in range(20) if run(source, f"--pdl-seed={seed}").ret == 1)
    found = run(source, f"--pdl-seed={seed}")
    again = pytester.runpytest_inprocess(*replay_command(found), "-p", "no:cacheprovider")
    assert failure_lines(again) == failure_lines(found) != []


def test_all_schedules_of_a_small_test(run):
    source = RACE.replace("schedules(50)", 'schedules("all")')
    run(source).stdout.fnmatch_lines(["*schedule * of all fails first*"])
    run(source.replace('== 1, "', 'in range(1, 4), "')).assert_outcomes(passed=1)
    few = run(source.replace('== 1, "', 'in range(1, 4), "').replace('"all"', '"all", at_most=2'))
    few.stdout.fnmatch_lines(["*Inconclusive: no schedule of the 2 that were run fails, but there are more*"])


def test_a_test_with_the_fixture_world_runs_under_each_schedule(run, pytester):
    source = (
        HEAD
        + """
def program():
    return first_of(dist.get_rank(), dist.get_world_size())

@pytest.mark.schedules(50)
def test_race(world):
    assert world.run(program, world_size=3)[0] == 1
"""
    )
    found = run(source)
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*schedule * of 50 fails first*"])
    again = pytester.runpytest_inprocess(*replay_command(found), "-p", "no:cacheprovider")
    assert failure_lines(again) == failure_lines(found) != []
    run(source.replace("== 1", "in (1, 2)")).assert_outcomes(passed=1)


WRITES = """
import pytest, torch, torch.distributed as dist

def write_and_read(folder, late):
    assert (folder / "kept").read_text() == "from before the first schedule"
    if late:
        dist.barrier()
    if dist.get_rank() == 0:
        (folder / "new").mkdir()
        (folder / "new" / "saved").write_text("saved")
        (folder / "link").symlink_to(folder / "new")
    if not late:
        dist.barrier()
    if not (folder / "new" / "saved").exists():
        raise FileNotFoundError("read before it was written")
"""
IN_TMP_PATH = (
    WRITES
    + """
@pytest.fixture
def folder(tmp_path):
    (tmp_path / "kept").write_text("from before the first schedule")
    return tmp_path

@pytest.mark.schedules(20)
def test_it(world, folder):
    world.run(write_and_read, folder, LATE, world_size=2)
"""
)
IN_SHARED_TMP_PATH_OF_THE_CALLER = IN_TMP_PATH.replace("tmp_path", "shared_tmp_path")
IN_SHARED_TMP_PATH = (
    WRITES
    + """
@pytest.mark.schedules(20)
@pytest.mark.world_size(2)
def test_it(rank, shared_tmp_path):
    if rank == 0:
        assert list(shared_tmp_path.iterdir()) == []
        (shared_tmp_path / "kept").write_text("from before the first schedule")
    dist.barrier()
    write_and_read(shared_tmp_path, LATE)
"""
)


@pytest.mark.parametrize(
    "source",
    [IN_TMP_PATH, IN_SHARED_TMP_PATH_OF_THE_CALLER, IN_SHARED_TMP_PATH],
    ids=["tmp_path", "shared_tmp_path of the caller", "shared_tmp_path"],
)
def test_a_schedule_finds_no_file_that_another_has_written(run, pytester, source):
    """Rank 0 runs first under the first schedule, so a file that it left would exist under all others."""
    run(source.replace("LATE", "False")).assert_outcomes(passed=1)
    source = source.replace("LATE", "True").replace("dist.get_rank() == 0", "dist.get_rank() == WRITER")
    for writer in range(2):
        found = run(source.replace("WRITER", str(writer)))
        found.assert_outcomes(failed=1)
        found.stdout.fnmatch_lines(["*read before it was written*", "*schedule * of 20 fails first*"])
        again = pytester.runpytest_inprocess(*replay_command(found), "-p", "no:cacheprovider")
        assert failure_lines(again) == failure_lines(found) != []


@pytest.mark.parametrize(("marker", "argument"), [("@pytest.mark.schedules(50)", ""), ("", ", schedule=schedules()")])
def test_a_property_shrinks_its_schedule_with_its_inputs(run, marker, argument):
    result = run(
        HEAD
        + f"""
{marker}
@pytest.mark.world_size(3)
@settings(max_examples=200, database=None, deadline=None, derandomize=True)
@given(values=st.lists(st.integers(0, 9)){argument})
def test_race(rank, world_size, values{argument and ", schedule"}):
    assert first_of(rank, world_size) == 1 or sum(values) <= 3
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r".*values=\[4\]"])
    result.stdout.re_match_lines([r".*schedule: replay:\d+r2$"])


@pytest.mark.parametrize("option", ["last", "pct", "replay:x"])
def test_an_unknown_schedule_is_a_usage_error(run, option):
    result = run("def test(): pass", f"--schedule={option}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--schedule must be first, random*"])


@pytest.mark.parametrize("arguments", ["", "0", "True", "'some'", "5, 6"])
def test_the_marker_refuses_what_it_cannot_mean(run, arguments):
    result = run(RACE.replace("schedules(50)", f"schedules({arguments})"))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*schedules takes a number of schedules, such as schedules(50)*"])
