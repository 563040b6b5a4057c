"""The pytest session in each rank process, and the use of its verdicts."""

from __future__ import annotations

import pytest

from ..conftest import HEAD

VERDICTS = """
pytest.importorskip("torch")

class Unsendable(Exception):
    def __init__(self, one, two):
        super().__init__("unsendable")

@W
def test_all_skip(): pytest.skip("nobody")

@W
def test_one_skips(rank):
    if rank == 1:
        pytest.skip("not this one")
    dist.barrier()

@W
def test_a_failure_counts_more_than_a_skip(rank):
    if rank == 1:
        pytest.skip("not this one")
    assert rank == 1, "a real failure"

@W
@pytest.mark.skipif(True, reason="by a mark")
def test_skipif(): raise AssertionError

@W
def test_importorskip(): pytest.importorskip("no_such_module")

@W
@pytest.mark.xfail(run=False, reason="not run")
def test_not_run(): os.abort()

@W
@pytest.mark.xfail(strict=True, reason="strict")
def test_strict(): pass

@W
@pytest.mark.xfail(strict=False, reason="lenient")
def test_lenient(): pass

@W
@pytest.mark.xfail(raises=Unsendable, reason="its class")
def test_raises_of_xfail(rank): raise Unsendable(1, 2)

@W
@pytest.mark.xfail(raises=KeyError, reason="on one rank only")
def test_another_failure(rank):
    if rank == 0:
        raise KeyError
    raise ValueError("not expected")

@W
def test_late_mark(request):
    request.node.add_marker(pytest.mark.xfail(reason="marked late"))
    assert 0

@W
def test_late_strict_mark(request):
    request.node.add_marker(pytest.mark.xfail(reason="marked late", strict=True))

@W
def test_xfail_call(rank):
    if rank == 0:
        pytest.xfail("called")
    dist.barrier()

@W
def test_raises_on_one(rank, monkeypatch):
    monkeypatch.setenv("MINE", str(rank))
    if rank == 1:
        with pytest.raises(KeyError):
            raise KeyError
    dist.barrier()
    assert os.environ["MINE"] == str(rank)

def test_monkeypatch_is_undone(world):
    assert world.run(os.environ.get, "MINE", world_size=2) == [None, None]
"""


def test_one_verdict_is_made_of_those_of_the_ranks(run):
    result = run(VERDICTS, "-rsxXf", "-v")
    # failed: a failure beside a skip, strict, another failure, the late strict mark
    result.assert_outcomes(skipped=4, failed=4, xfailed=4, xpassed=1, passed=2)
    text = result.stdout.str()
    for words in (
        "SKIPPED [1] test_inner.py:11: nobody",
        "SKIPPED [1] test_inner.py:14: rank 1 of 2 skipped: not this one",
        "AssertionError: a real failure",
        "could not import 'no_such_module'",
        "[XPASS(strict)] strict",
        "XFAIL test_inner.py::test_raises_of_xfail[gloo-2] - its class",
        "ValueError: not expected",
        "XFAIL test_inner.py::test_late_mark[gloo-2] - marked late",
        "[XPASS(strict)] marked late",
    ):
        assert words in text, words


SKIPS = """
import time

@pytest.fixture
def skips_on_one(rank):
    if rank == 0:
        pytest.skip("no fixture")

@pytest.fixture
def fails_on_one(rank):
    if rank == 0:
        pytest.skip("no fixture")
    raise OSError("no such disk")

@W
def test_one_skips(rank, tmp_path):
    if rank == 1:
        pytest.skip("not this one")
    dist.barrier()

@W
@pytest.mark.schedules(10)
def test_one_skips_under_schedules(rank):
    if rank == 1:
        pytest.skip("under schedules")

@W
def test_a_fixture_skips(skips_on_one): raise AssertionError

@W
def test_a_failure_counts_more(rank):
    if rank == 1:
        pytest.skip("not this one")
    assert rank == 1, "a failure in the body"

@W
def test_a_failure_long_after_it_counts_more(rank):
    if rank == 1:
        pytest.skip("not this one")
    time.sleep(1)
    assert rank == 1, "a failure a second later"

@W
def test_nobody_waits_for_a_rank_that_skips(rank):
    if rank == 1:
        pytest.skip("nobody waits")
    dist.all_reduce(torch.ones(2))
    raise OSError("nobody gets here")

@W
@pytest.mark.schedules(10)
def test_a_failure_under_the_same_schedule_counts_more(rank):
    if rank == 1:
        pytest.skip("not this one")
    assert rank == 1, "a failure under a schedule"

@W
def test_a_failure_in_a_fixture_counts_more(fails_on_one): pass
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_failure_of_one_rank_counts_more_than_a_skip_of_another(run, world):
    result = run(SKIPS, "-rs", world=world)
    result.assert_outcomes(skipped=4, failed=3, errors=1)
    text = result.stdout.str()
    for words in (
        "SKIPPED [1] test_inner.py:18: rank 1 of 2 skipped: not this one\n",
        "SKIPPED [1] test_inner.py:24: rank 1 of 2 skipped: under schedules\n",
        "SKIPPED [1] test_inner.py:30: rank 0 of 2 skipped: no fixture\n",
        "AssertionError: a failure in the body",
        "AssertionError: a failure a second later",
        ": rank 1 of 2 skipped: nobody waits",
        "AssertionError: a failure under a schedule",
        "OSError: no such disk",
    ):
        assert words in text, words


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_failure_in_a_function_on_ranks_counts_more_than_what_came_before_it_on_another(run, world):
    source = """
import time

def leaves(leave, right, who):
    if dist.get_rank() == who:
        leave(f"rank {who} leaves")
    time.sleep(0.2)  # so that this comes later
    assert right, "a failure"

@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("leave", [pytest.skip, pytest.xfail])
@pytest.mark.parametrize("who", [0, 1])
def test_leaves(world, leave, right, who):
    world.run(leaves, leave, right, who, world_size=2)
"""
    result = run(source, world=world)
    result.assert_outcomes(skipped=2, xfailed=2, failed=4)
    result.stdout.fnmatch_lines(["E*AssertionError: a failure", "E*rank 0 raised Skipped: rank 0 leaves"])


@pytest.mark.parametrize(("right", "outcome"), [(True, "skipped"), (False, "failed")])
def test_a_failure_under_one_schedule_counts_more_than_a_skip_under_another(run, right, outcome):
    source = f"""
began = []

@W
@pytest.mark.schedules(5)
def test_the_first_schedule_skips():
    began.append(1)
    dist.barrier()
    if len(began) == 2:
        pytest.skip("by the schedule")
    assert {right}
"""
    result = run(source, "-rs", world="sim")
    result.assert_outcomes(**{outcome: 1})
    assert right == ("SKIPPED [1] test_inner.py:7: by the schedule\n" in result.stdout.str())


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest 8 has no subtests; install pytest 9")
@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_failing_subtest_fails_the_test_and_names_its_rank(run, world):
    result = run(
        """
@W
def test_some(subtests, rank):
    for i in range(3):
        with subtests.test("step", i=i):
            dist.barrier()
            assert i != 1 or rank == 0
            assert i != 2

@W
def test_good(subtests):
    with subtests.test("step"):
        dist.barrier()
        print("printed in a subtest")
        dist.barrier()
""",
        "-rA",
        world=world,
    )
    text = result.stdout.str()
    text = text.replace("'", "")  # only some releases quote the values
    assert f"SUBFAILED[rank 1: step] (i=1) test_inner.py::test_some[{world}-2]" in text
    assert text.count("SUBFAILED[step] (i=2)") == 1, "what fails in the same way on all ranks is told once"
    assert text.count("\nprinted in a subtest") == 2
    assert "contains 2 failed subtests" in text
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["", "inner"], ids=["beside all tests", "beside some"])
def test_a_conftest_file_that_fails_in_a_rank_is_told_and_other_tests_run(pytester, folder):
    inner = pytester.path / folder
    inner.mkdir(exist_ok=True)
    fails = "import os\nif os.environ.get('LOCAL_RANK') == '1':\n    import no_such_module\n"
    (inner / "conftest.py").write_text(fails)
    (inner / "test_ranks.py").write_text(HEAD + "\n@W\ndef test_ranks(rank): pass\n")
    pytester.makepyfile(test_plain="def test_plain(): pass\n")
    result = pytester.runpytest_inprocess("--world", "gloo", "-p", "no:cacheprovider", "-rE")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*conftest.py:3: in <module>", "*import no_such_module", "E * No module named 'no_such*", "*rank 1 of 2*"]
    )
