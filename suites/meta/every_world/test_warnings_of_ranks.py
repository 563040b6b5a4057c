"""Warnings of ranks in ``world.run``: filters apply there, and recorders get them, on processes as on ``sim``."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch.distributed as dist

from pdlcheck.worlds import get_world

INNER = """
import warnings
import pytest
import torch.distributed as dist


class Aging(UserWarning):
    pass


def warns(category=UserWarning, text="this is old"):
    warnings.warn(text, category)
    return dist.get_rank()


def test_plain(world):
    assert world.run(warns, world_size=2) == [0, 1]


def test_expected(world):
    with pytest.warns(UserWarning, match="is old"):
        world.run(warns, world_size=2)


def test_expected_and_absent(world):
    with pytest.warns(DeprecationWarning):
        world.run(warns, world_size=2)


def test_of_a_class_of_its_own(world):
    with pytest.warns(Aging):
        world.run(warns, Aging, world_size=2)


@pytest.mark.filterwarnings("ignore:this is")
def test_ignored(world, recwarn):
    world.run(warns, world_size=2)


@pytest.mark.filterwarnings("error:this is")
def test_an_error(world):
    with pytest.raises(UserWarning, match="is old"):
        world.run(warns, world_size=2)


def test_counted(world):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        for _ in range(2):
            world.run(warns, world_size=3)
    with warnings.catch_warnings(record=True) as every:
        warnings.simplefilter("always")
        world.run(warns, world_size=3)
    assert (len(heard), len(every)) == (1, 3)
    assert {one.filename for one in [*heard, *every]} == {__file__}
    assert {one.lineno for one in [*heard, *every]} == {11}


def test_caught_on_the_rank(world):
    def catches():
        with pytest.warns(UserWarning):
            warns()

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        world.run(catches, world_size=2)
    assert heard == []


@pytest.mark.filterwarnings("error")
def test_the_functions_own_filters_count_more(world):
    def is_lenient():
        warnings.simplefilter("always")
        return warns()

    assert world.run(is_lenient, world_size=2) == [0, 1]


def test_the_ranks_own_filters_are_gone_afterwards(world):
    with world.open(2) as ranks:
        ranks.run(warnings.simplefilter, "ignore")
        with pytest.warns(UserWarning):
            ranks.run(warns)
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_verdicts_and_the_summary_are_the_same(pytester, world):
    pytester.makepyfile(test_inner=INNER)
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-rA", "-W", "default"]
    result = pytester.runpytest_inprocess("--world", world, *options)
    result.assert_outcomes(passed=9, failed=1)
    result.stdout.fnmatch_lines(["FAILED test_inner.py::test_expected_and_absent*"])
    summary = result.stdout.str().partition("= warnings summary =")[2]
    told = [line for line in summary.splitlines() if line.startswith("test_inner.py::")]
    names = ["plain", *2 * ["expected_and_absent"], *2 * ["the_functions_own_filters_count_more"]]
    assert told == [f"test_inner.py::test_{name}[{world}]" for name in names]
    assert "test_inner.py:11: UserWarning: this is old" in summary


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_warnings_are_errors_where_the_command_says_so(pytester, world):
    pytester.makepyfile(test_inner=INNER)
    result = pytester.runpytest_inprocess(
        "--world", world, "-p", "no:cacheprovider", "-W", "error:this is old", "-k", "plain"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *UserWarning: this is old", "E *ranks 0, 1 of 2 raised this*"])


def _warns():
    warnings.warn("on every rank", stacklevel=1)


@pytest.mark.slow
def test_without_a_recorder_ranks_write_to_their_stderr(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import warnings\n"
        "from pdlcheck.worlds import get_world\n"
        "def warns(): warnings.warn('on every rank')\n"
        "if __name__ == '__main__': get_world('gloo').run(warns, world_size=2)\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.count("UserWarning: on every rank") == 2
    ended = subprocess.run([sys.executable, "-W", "error", str(program)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "UserWarning: on every rank" in ended.stderr


def test_one_that_fails_writes_what_it_has_warned_of():
    def fails():
        _warns()
        raise OSError("no more")

    world = get_world("gloo")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            with pytest.raises(OSError, match="no more") as raised:
                world.run(fails, world_size=2)
    finally:
        world.close()
    assert heard == []
    assert "UserWarning: on every rank" in "".join(raised.value.__notes__)  # beside the rank's output


def test_a_warning_that_cannot_travel_is_told_by_its_words():
    def warns():
        class Local(UserWarning):
            def __reduce__(self):
                raise TypeError("stays here")

        warnings.warn(Local("of a class that stays"), stacklevel=1)
        return dist.get_rank()

    world = get_world("gloo")
    try:
        with pytest.warns(Warning, match="Local: of a class that stays"):
            assert world.run(warns, world_size=2) == [0, 1]
    finally:
        world.close()


def test_a_filter_of_a_category_that_no_rank_can_import_is_left_out():
    class Stays(UserWarning):
        pass

    Stays.__reduce__ = None
    world = get_world("gloo")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Stays)
            assert world.run(dist.get_rank, world_size=2) == [0, 1]
    finally:
        world.close()
