"""Items that begin on their ranks while the item before is reported: which ones do, and that reports do not differ."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from pdlcheck.errors import RankDied
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller.pool import Pool

from ..conftest import HEAD
from ..still_running import still_running

BEFORE = "@W\ndef test_before(): pass\n"
AFTER = "@W\ndef test_after(rank): pass\n"
REPORTS = "def pytest_runtest_logreport(report): pass\n"
LOOKS = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item): return (yield)
"""


@pytest.fixture
def begun(monkeypatch):
    """Return the names of the items that began early."""
    names, honest = [], Pool.begin

    def begin(self, key, *args, **more):
        names.append(key[1].partition("::")[2])
        honest(self, key, *args, **more)

    monkeypatch.setattr(Pool, "begin", begin)
    return names


@pytest.mark.parametrize("conftest", ["", REPORTS])
def test_an_item_that_asks_for_nothing_but_ranks_prefetchable_item(run, begun, conftest):
    middle = '@pytest.mark.parametrize("x", [1, 2])\n@W\ndef test_middle(rank, x): dist.barrier()\n'
    run(BEFORE + middle + AFTER, conftest=conftest).assert_outcomes(passed=4)
    assert begun == ["test_middle[gloo-2-1]", "test_middle[gloo-2-2]", "test_after[gloo-2]"]


@pytest.mark.parametrize(
    ("after", "options", "conftest", "outcomes"),
    [
        (AFTER.replace("rank", "tmp_path"), (), "", {"passed": 2}),
        (f"@pytest.mark.skipif(True, reason='no')\n{AFTER}", (), "", {"passed": 1, "skipped": 1}),
        (f"@pytest.mark.xfail(run=False)\n{AFTER}", (), "", {"passed": 1, "xfailed": 1}),
        (AFTER.replace("W", "pytest.mark.world_size(3)"), (), "", {"passed": 2}),
        (f"@pytest.mark.isolation('reinit')\n{AFTER}", (), "", {"passed": 2}),
        (f"@pytest.mark.somebodys\n{AFTER}", (), "", {"passed": 2}),
        (AFTER, ("--isolation", "fresh"), "", {"passed": 2}),
        (AFTER, ("--isolation", "reinit"), "", {"passed": 2}),
        (AFTER, ("-s",), "", {"passed": 2}),
        (AFTER, ("--rank-pdb", "1"), "", {"passed": 2}),
        (AFTER, (), LOOKS, {"passed": 2}),
        ("def test_on_no_rank(): pass\n", (), "", {"passed": 2}),
    ],
    ids=["fixture", "skip", "xfail", "size", "isolation", "mark", "fresh", "reinit", "live", "debug", "hook", "plain"],
)
def test_what_could_tell_the_difference_does_not(run, begun, after, options, conftest, outcomes):
    quiet = ("-W", "ignore::pytest.PytestUnknownMarkWarning")
    run(BEFORE + after, *options, *quiet, conftest=conftest).assert_outcomes(**outcomes)
    assert begun == []


STOPS = """
@W
@pytest.mark.xfail(strict=True)
def test_passes_unexpectedly(): pass

@W
def test_after(): pass
"""


@pytest.mark.parametrize("first", [STOPS, "@W\ndef test_fails(): assert 0\n" + AFTER], ids=["strict", "failure"])
def test_no_item_begins_that_will_not_run(run, begun, first):
    run(first, "-x").assert_outcomes(failed=1)
    assert begun == []


ENOUGH = """
sessions = []

def pytest_sessionstart(session):
    sessions.append(session)

def pytest_runtest_logreport():
    sessions[0].shouldstop = "enough"
"""


def test_no_item_begins_after_a_plugin_has_seen_enough(run, begun):
    run(BEFORE + AFTER, conftest=ENOUGH).assert_outcomes(passed=1)
    assert begun == []


NOTES = """
from pdlcheck.worlds.processes.controller.pool import Pool

honest = Pool.begin

def begin(self, *all, **more):
    open("begun", "w").close()
    honest(self, *all, **more)

Pool.begin = begin
"""


@pytest.mark.slow
@pytest.mark.parametrize(("options", "early"), [((), True), (("-n", "1"), False)], ids=["alone", "worker"])
def test_workers_of_xdist_that_know_one_item_ahead_begin_none_early(pytester, options, early):
    pytester.makepyfile(HEAD + BEFORE + AFTER.replace("after", "one") + AFTER)
    pytester.makeconftest(NOTES)
    pytester.runpytest_subprocess("--world", "gloo", *options).assert_outcomes(passed=3)
    assert (pytester.path / "begun").exists() == early


VERDICTS = """
def note(text):
    with open("order", "a") as file:
        file.write(f"{text} on {dist.get_rank()}\\n")

@pytest.fixture(scope="module")
def wide():
    yield
    note("wide ends")

@W
def test_first(rank):
    note("first")
    print("first on", rank)

@W
def test_with_a_wide_fixture(rank, wide): note("second")

@W
def test_after_it(rank): note("third")

@W
def test_writes(rank):
    note("fourth")
    print("fourth on", rank)
    warnings.warn(f"from {rank}")
    logging.getLogger().error("logged on %d", rank)

@W
def test_fails_on_one(rank):
    note("fifth")
    assert rank == 0, "not rank 0"

@W
def test_after_a_failure(rank): dist.barrier()

@W
def test_last(rank): note("last")
"""
FAULTS = """
@W
def test_differs(rank): dist.all_reduce(torch.ones(2 + rank))

@W
def test_after_that(rank): dist.barrier()

@W
def test_skips(rank): pytest.skip("in the body")

@W
def test_dies(rank):
    if rank == 1:
        os._exit(3)
    dist.barrier()

@W
def test_after_a_death(rank): dist.barrier()

@W
def test_changes_the_seed(rank): torch.manual_seed(7)

@W
def test_draws(rank): print(torch.rand(1).item())

@W
@pytest.mark.timeout(2)
def test_hangs(rank):
    if rank == 1:
        import time
        time.sleep(100)

@W
def test_after_a_hang(rank): dist.barrier()
"""


@pytest.fixture
def reports(run, pytester):
    """Return a function that runs the files, and returns the reports and the order of events on each rank."""

    def reports(**files):
        (pytester.path / "order").unlink(missing_ok=True)
        result = run(VERDICTS, test_other=HEAD + FAULTS, **files)
        seen = [
            (report.nodeid, report.when, report.outcome, sorted(report.sections), _head(report))
            for report in result.reprec.getreports("pytest_runtest_logreport")
        ]
        order = (pytester.path / "order").read_text().splitlines()
        return seen, [[line for line in order if line.endswith(f"on {rank}")] for rank in range(2)]

    return reports


def _head(report):
    return str(getattr(getattr(report.longrepr, "reprcrash", None), "message", "")).partition("\n")[0]


def test_verdicts_output_and_order_are_the_same(reports, begun):
    early = reports()
    assert len(begun) > 3
    begun.clear()
    late = reports(conftest=LOOKS)
    assert begun == []
    assert early == late
    words = ["first", "second", "third", "fourth", "fifth", "last", "wide ends"]
    assert early[1] == [[f"{word} on {rank}" for word in words] for rank in range(2)]


# -- the world's side: a call that was begun, and somebody else comes --------------------------------


@pytest.fixture
def world():
    world = ProcessWorld(timeout_s=20)
    yield world
    world.close()


def leaves_a_note(path):
    time.sleep(0.05)
    with open(path, "a") as file:
        file.write(f"{dist.get_rank()}\n")
    return dist.get_rank()


def test_a_call_that_was_begun_runs_once_for_who_asks_by_its_key(world, tmp_path):
    path = str(tmp_path / "notes")
    with world.open(2) as ranks:
        ranks.begin("key", leaves_a_note, path)
    with world.open(2, begun="key") as ranks:
        assert ranks.end("another") is None
        assert [outcome.value for outcome in ranks.end("key")] == [0, 1]
        assert ranks.end("key") is None
        assert ranks.run(dist.get_world_size) == [2, 2]
    assert sorted((tmp_path / "notes").read_text().split()) == ["0", "1"]


def test_who_comes_instead_gets_the_outcomes_of_his_own_call(world, tmp_path):
    path = str(tmp_path / "notes")
    pids = world.pids(2)
    with world.open(2) as ranks:
        ranks.begin("key", leaves_a_note, path)
    assert world.run(dist.get_world_size, world_size=2) == [2, 2]
    assert sorted((tmp_path / "notes").read_text().split()) == ["0", "1"]
    assert world.pids(2) == pids


def test_a_death_in_a_call_that_nobody_asks_for_is_nobody_elses(world):
    with world.open(2) as ranks:
        ranks.begin("key", os._exit, 3)
    assert world.run(dist.get_world_size, world_size=2) == [2, 2]


def test_a_death_in_a_call_that_was_begun_is_told_to_who_asks_for_it(world):
    with world.open(2) as ranks:
        ranks.begin("key", os._exit, 3)
    time.sleep(0.1)
    with world.open(2, begun="key") as ranks:
        outcomes = ranks.end("key")
    assert any(isinstance(outcome.error, RankDied) for outcome in outcomes)


def test_a_world_is_closed_though_a_call_runs_that_was_begun(world):
    with world.open(2) as ranks:
        pids = ranks.pids
        ranks.begin("key", time.sleep, 100)
    world.close()
    assert not still_running(pids)
