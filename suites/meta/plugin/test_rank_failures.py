"""The single report of failures on rank processes: error, place and ranks, without the plugin's own frames."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from ..needs_mpi import needs_mpi


def test_the_notes_of_an_exception_are_shown_once_and_so_is_what_became_of_the_ranks(run):
    source = """
@W
def test_noted(rank):
    error = ValueError("wrong")
    error.add_note("first line of a note\\nsecond line of it")
    raise error
"""
    result = run(source)
    result.assert_outcomes(failed=1)
    text = result.stdout.str().partition("= FAILURES =")[2].partition("= short test summary info =")[0]
    assert "\nE       second line of it" in text
    assert text.count("second line of it") == 2, "in the source and in the error"
    assert "ranks 0, 1 of 2 raised this" in text


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_notes_of_other_ranks_are_shown_too_and_reach_junit(run, pytester, world):
    source = """
@pytest.mark.world_size(3)
def test_noted(rank):
    error = ValueError("wrong") if rank < 2 else IndexError("outside")
    error.add_note(f"note of rank {rank}" if rank else "first line\\nsecond line")
    dist.barrier()
    raise error
"""
    run(source, "--junit-xml=out.xml", world=world).assert_outcomes(failed=1)
    failure = str(next(ElementTree.parse(pytester.path / "out.xml").iter("failure")).text)
    for note in ("second line", "note of rank 1", "note of rank 2"):
        assert note in failure
    for line in ("ValueError: wrong", "IndexError: outside"):
        assert line in failure


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_the_short_summary_tells_what_was_raised_and_one_line_where(run, options):
    source = """
@W
def test_wrong(rank):
    dist.barrier()
    assert rank < 0, "the message"
"""
    result = run(source, *options, *("-p", "no:randomly"))
    result.stdout.fnmatch_lines(["E*AssertionError: the message", "*test_wrong?gloo-2? - AssertionError: the m*"])
    result = run(source, "--tb=line", *options, *("-p", "no:randomly"))
    result.stdout.fnmatch_lines(["*test_inner.py:8: AssertionError: the message*"])


ALIKE = """
class Thing:
    def __init__(self, rank):
        self.padding = [object() for _ in range(100 * rank)]

@W
def test_fails(rank):
    raise ValueError(f"bad thing\\n{Thing(rank)!r} of {%s}")

@W
def test_skips(rank):
    pytest.skip(f"bad thing {Thing(rank)!r} of {%s}")

@W
def test_warns(rank):
    warnings.warn(f"bad thing {Thing(rank)!r} of {%s}")
"""


@pytest.mark.parametrize("same", [True, False])
def test_addresses_of_objects_do_not_tell_ranks_apart_and_values_do(run, same):
    result = run(ALIKE.replace("%s", "'all'" if same else "rank"), "-rs")
    result.assert_outcomes(failed=1, skipped=1, passed=1, warnings=1 if same else 2)
    text = result.stdout.str()
    assert ("ranks 0, 1 of 2 raised this" in text) == same
    assert ("failed at the same line: <test_inner.Thing object at 0x" in text) == (not same)
    assert ("of 2 skipped" in text) == (not same)


FAILING = """
class Mine(Exception):
    pass

class Unsendable(Exception):
    def __init__(self, one, two):
        super().__init__("unsendable")

@W
def test_assert(): assert [1] == [2]

@W
def test_own_class(): raise Mine("first line\\nsecond")

@W
def test_unsendable(): raise Unsendable(1, 2)

@W
def test_deadlock(rank): dist.recv(torch.ones(1), 1 - rank)
"""


def test_the_short_summary_is_that_of_simulated_ranks(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    summaries = []
    for world in ("sim", "gloo"):
        result = run(FAILING, "-rf", world=world)
        result.assert_outcomes(failed=4)
        lines = [line.replace(world, "world") for line in result.outlines if line.startswith("FAILED")]
        summaries.append(lines)
    assert summaries[0] == summaries[1]
    assert summaries[1][:2] == [
        "FAILED test_inner.py::test_assert[world-2] - assert [1] == [2]",
        "FAILED test_inner.py::test_own_class[world-2] - test_inner.Mine: first line",
    ]
    text = result.stdout.str()
    assert text.count("ranks 0, 1 of 2 raised this") == 3, "the deadlock tells of both by itself"
    assert "announced.py" not in text, "a verdict is shown at the user's line"
    assert "\n    @W\n>   def test_unsendable" in text, "the first line of the source is indented as the others"


def test_a_missing_fixture_and_the_end_of_the_session_are_told_in_a_line(run):
    source = """
@W
def test_missing(nosuch): pass

@W
def test_exit(rank):
    if rank == 1:
        pytest.exit("enough")

@W
def test_never(): pass
"""
    result = run(source)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["ERROR *test_missing?gloo-2? - fixture 'nosuch' not found", "!* *Exit: enough"])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_keyboard_interrupt_that_nobody_pressed_is_a_failure_of_its_test(run, world):
    source = """
@pytest.fixture
def interrupted(rank):
    if rank == 1:
        raise KeyboardInterrupt
    dist.barrier()

@W
def test_body(rank):
    if rank == 1:
        raise KeyboardInterrupt
    dist.barrier()

@W
def test_fixture(interrupted): pass

@W
def test_after(rank): dist.barrier()
"""
    result = run(source, world=world)
    result.assert_outcomes(failed=1, errors=1, passed=1)
    cure = "raise an ordinary exception to make the call fail"
    result.stdout.fnmatch_lines([f"E *RankFailed: rank 1 raised KeyboardInterrupt; {cure}"] * 2)


@needs_mpi
def test_an_exit_on_mpi_is_shown_as_it_was_raised(run):
    source = """
@W
def test_exit(rank):
    if rank == 1:
        sys.exit(3)
    dist.barrier()
"""
    result = run(source, world="mpi")
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r">.*sys\.exit\(3\)", r"E +SystemExit: 3$", r".*test_inner\.py:\d+: SystemExit$"])
    result.stdout.no_fnmatch_line("*ending.py*")


def test_a_file_that_one_rank_cannot_import_is_told_by_its_own_error_without_the_insides(run):
    source = """
if os.environ.get("RANK") == "1":
    import absent_here

@W
def test_alone(rank): ...
"""
    result = run(source)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["E   ModuleNotFoundError: No module named 'absent_here'", "rank 1 of 2 raised this"])
    result.stdout.fnmatch_lines(["E   LookupError: a rank collected */test_inner.py and found no *test_alone?gloo-2?"])
    result.stdout.fnmatch_lines(["ERROR *test_alone?gloo-2? - ModuleNotFoundError: No modu*"])
    result.stdout.no_fnmatch_line("*ranked.py*")


def test_a_file_that_one_rank_skips_is_skipped_with_its_reason(run):
    source = """
if os.environ.get("RANK") == "1":
    pytest.skip("no device here", allow_module_level=True)

@W
def test_one(rank): ...

@W
def test_two(rank): ...
"""
    result = run(source, "-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED *: rank 1 of 2 skipped: no device here"])


@pytest.mark.parametrize("marked", [True, False])
def test_a_test_without_ranks_is_told_how_it_has_them(run, marked):
    source = """
class TestReduce:
    world_size = 2

    def test_it(self):
        assert dist.get_world_size() == 2
"""
    result = run(f"\n@W{source}" if marked else source)
    result.assert_outcomes(passed=int(marked), failed=int(not marked))
    assert ("mark it, or its class, @pytest.mark.world_size(2)" in result.stdout.str()) == (not marked)


def test_an_exception_that_says_how_it_is_pickled_has_the_report_of_its_rank(run):
    result = run(
        """
class Odd(Exception):
    def __init__(self, what, number):
        super().__init__(f"{what} {number}")
        self.what, self.number = what, number

    def __reduce__(self):
        return Odd, (self.what, self.number)

@W
def test_odd(rank):
    if rank == 1:
        raise Odd("thing", 7)
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(['>           raise Odd("thing", 7)', "E * test_inner.Odd: thing 7"])
    assert "traceback on rank" not in result.stdout.str()


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_skip_of_unittest_in_a_body_or_fixture_hides_no_failure_and_names_its_rank(run, world):
    result = run(
        """
import unittest

@pytest.fixture
def skips_or_fails(rank):
    raise unittest.SkipTest("no") if rank == 0 else ValueError("wrong")

@W
def test_in_a_fixture(skips_or_fails): pass

def skip_or_fail():
    raise unittest.SkipTest("no") if dist.get_rank() == 0 else ValueError("wrong")

def test_called(world):
    world.run(skip_or_fail, world_size=2)

@W
def test_waited_for(rank):
    if rank == 1:
        raise unittest.SkipTest("not here")
    dist.barrier()
""",
        "-rs",
        world=world,
    )
    result.assert_outcomes(errors=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * rank 1 of 2 skipped: not here"])
