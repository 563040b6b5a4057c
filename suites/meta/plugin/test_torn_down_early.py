"""Fixtures in ranks are torn down if a session, its processes or a set-up end early."""

from __future__ import annotations

import pytest

from ..needs_mpi import needs_mpi

SPENT = """
def log(what):
    with open(f"log{os.environ['RANK']}", "a") as file:
        file.write(what + " ")

@pytest.fixture(scope="session")
def wide():
    log("(")
    yield
    log(")")

@pytest.fixture
def own():
    log("[")
    yield
    log("]")

@W
def test_first(wide, own): pass

@W
def test_destroys_the_group(wide, own): dist.destroy_process_group()

@W
def test_makes_too_many_groups(wide, own):
    for _ in range(40):
        dist.new_group([0, 1])

@W
def test_with_the_fixture(wide): pass

@W
def test_destroys_the_group_and_has_no_fixture(): dist.destroy_process_group()

@W
def test_skips_while_another_rank_communicates(rank, wide, own):
    if rank == 1:
        pytest.skip("not this one")
    dist.barrier()

@W
def test_fails(wide, own): assert dist.destroy_process_group()

@W
def test_last(rank, own): assert dist.get_rank() == rank
"""


@pytest.mark.parametrize("world", ["gloo", pytest.param("mpi", marks=needs_mpi)])
def test_fixtures_are_torn_down_before_other_processes_take_over(run, pytester, world):
    result = run(SPENT, "-p", "no:randomly", world=world)
    result.assert_outcomes(passed=6, skipped=1, failed=1)
    for rank in range(2):
        log = (pytester.path / f"log{rank}").read_text().replace(" ", "")
        assert log.startswith("([][])([])()([]"), log
        assert log.count("[") == log.count("]") == 6
        assert log.count("(") == log.count(")")


ENDS = """
@pytest.fixture(scope="session")
def wide():
    yield
    with open(f"ended{dist.get_world_size()}-{dist.get_rank()}", "w"):
        pass

@pytest.mark.world_size(3)
def test_on_three(wide): pass

@pytest.mark.world_size(2)
def test_on_two(wide): pass

%s

@pytest.mark.world_size(2, 3)
def test_never(wide): pass
"""
END_IN_A_RANK = "@W\ndef test_ends(rank, wide):\n    if rank == 1:\n        pytest.exit('enough', 9)"
END_IN_THE_CONTROLLER = "def test_ends(): pytest.exit('enough')"
END_BY_A_HOOK = "@W\ndef test_ends(wide): pass"
END_OF_A_TEARDOWN = """
@pytest.fixture
def fails(rank):
    yield
    raise OSError("in the last teardown")

@W
def test_ends(wide, fails): assert 0
"""
HOOK = """
def pytest_sessionfinish(session, exitstatus):
    with open("status", "a") as file:
        print(int(exitstatus), int(session.exitstatus), file=file)

def pytest_runtest_makereport(item, call):
    if call.when == "teardown" and "test_ends[gloo-2]" in item.nodeid:
        item.session.shouldstop = "enough"
"""


@pytest.mark.parametrize(
    ("source", "status"),
    [(END_IN_A_RANK, 9), (END_IN_THE_CONTROLLER, 2), (END_BY_A_HOOK, 2), (END_OF_A_TEARDOWN, 1)],
    ids=["rank", "controller", "hook", "teardown"],
)
def test_fixtures_of_the_session_are_torn_down_when_it_ends_early(run, pytester, source, status):
    hook = HOOK if source == END_BY_A_HOOK else HOOK.partition("def pytest_runtest_makereport")[0]
    result = run(ENDS % source, "-x", "-p", "no:randomly", conftest=hook)
    assert result.ret == status
    assert sorted(path.name for path in pytester.path.glob("ended*")) == [
        *(f"ended2-{rank}" for rank in range(2)),
        *(f"ended3-{rank}" for rank in range(3)),
    ]
    assert (pytester.path / "status").read_text() == f"{status} {status}\n" * 6


@pytest.mark.parametrize("isolation", ["pool", "reinit"])
def test_a_wide_fixture_that_the_failure_of_another_rank_stopped_is_set_up_again(run, pytester, isolation):
    source = """
@pytest.fixture(scope="session")
def log(rank_of):
    with open(f"log{rank_of}", "a") as log:
        yield lambda *words: print(*words, file=log)

@pytest.fixture(scope="session")
def rank_of(): return dist.get_rank()

@pytest.fixture(scope="session")
def fails(rank_of):
    if rank_of == 1:
        raise OSError("no such disk")

@pytest.fixture(scope="session")
def total(request, log):
    request.addfinalizer(lambda: log("end"))
    log("begin")
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

@W
def test_another_fixture_fails(fails, total): pass

@W
def test_the_fixture_is_well(total): assert total == 2

@W
def test_it_is_kept(total): assert total == 2

@W
def test_a_failed_one_stays_failed(fails, total): pass
"""
    result = run(source, "--isolation", isolation, "-p", "no:randomly")
    result.assert_outcomes(passed=2, errors=2)
    assert result.stdout.str().count("OSError: no such disk") > 1
    assert "PeerFailed" not in result.stdout.str()
    logs = [(pytester.path / f"log{rank}").read_text().split() for rank in range(2)]
    assert logs == [["begin", "end"] * 2, ["begin", "end"]]


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_fixture_is_torn_down_without_the_group_that_the_body_has_destroyed(run, world):
    result = run(
        """
@pytest.fixture
def own(tmp_path):
    yield
    assert not dist.is_initialized()

@W
def test_destroys(own): dist.destroy_process_group()

@W
def test_fails(own): assert dist.destroy_process_group()

@pytest.fixture
def joins(rank, world_size):
    yield
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()

@W
def test_joins_again(joins): dist.destroy_process_group()

@W
def test_next(rank, tmp_path): assert dist.get_rank() == rank
""",
        world=world,
    )
    result.assert_outcomes(passed=3, failed=1)
