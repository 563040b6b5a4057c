"""The controller's summary of faulthandler's dump, for a rank that dies or cannot answer."""

from __future__ import annotations

import os

import _pytest
import pluggy
import pytest

from pdlcheck.worlds.processes.controller.rank_handle import Died
from pdlcheck.worlds.processes.rank import main as rank
from pdlcheck.worlds.rank_reports import rank_died, take_stack

PLUGGY, PYTEST = os.path.dirname(pluggy.__file__), os.path.dirname(_pytest.__file__)
DUMP = f"""\
before
Fatal Python error: Segmentation fault

Current thread 0x00007f21c5d8b740 (most recent call first):
  File "/home/me/model.py", line 12 in forward
  File "/home/me/test_model.py", line 3 in test_a
  File "{PYTEST}/python.py", line 187 in pytest_pyfunc_call
  File "{PLUGGY}/_callers.py", line 147 in _multicall
  File "{rank.__file__}", line 141 in _serve
  File "<string>", line 1 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
after
"""


def test_a_death_is_told_with_the_frames_that_are_not_of_the_harness():
    error = rank_died(1, Died(-11), "", DUMP)
    said = [line.strip() for line in str(error).partition("stderr")[2].splitlines()]
    assert said == [
        "before",
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007f21c5d8b740 (most recent call first):",
        'File "/home/me/model.py", line 12 in forward',
        'File "/home/me/test_model.py", line 3 in test_a',
        "after",
    ]
    assert error.stderr == DUMP  # in full


def test_a_stack_is_taken_out_innermost_last():
    rest, stack = take_stack(DUMP)
    assert "most recent call first" not in rest
    assert stack.splitlines() == [
        '  File "/home/me/test_model.py", line 3, in test_a',
        '  File "/home/me/model.py", line 12, in forward',
    ]


@pytest.mark.parametrize("kept", [f'  File "{PLUGGY}/_callers.py", line 147 in _multicall\n', "  <no Python frame>\n"])
def test_where_there_is_nothing_of_the_user_all_frames_are_told(kept):
    text = str(rank_died(0, Died(-11), "", f"Stack (most recent call first):\n{kept}"))
    assert kept.strip() in text


def test_words_that_look_like_no_dump_stay_as_they_are():
    written = f'Extension modules: none\n  File "{PYTEST}/python.py", line 1 in f\n'
    assert [line.strip() for line in str(rank_died(0, Died(1), "", written)).splitlines()[1:]] == [
        "stderr          Extension modules: none",
        f'File "{PYTEST}/python.py", line 1 in f',
    ]
