"""The check of a schedule rejects grids that cannot run."""

from __future__ import annotations

import pytest

from pdlcheck.checks import check_schedule
from pdlcheck.errors import Inconclusive


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([["0F0", None], [None, "1F0", "1B0"]], "0B0 is not done once, whole or in halves"),
        ([["0F0", "0F0", None, "0B0"], [None, "1F0", "1B0"]], r"0F0 is done twice[\s\S]*>0F0<  >0F0<"),
        (
            [["0F0", None, None, "0B0"], ["1F0", None, "1B0"]],
            r"rank 1 does 1F0 in step 0, which reads 0F0, which is made",
        ),
        ([["0F0", "0B0"], [None, "1F0", "1B0"]], r"rank 0 does 0B0 in step 1, which reads 1B0, which nobody has made"),
        ([["0B0", "0F0"]], r"rank 0 does 0B0 in step 0, which reads 0F0, which nobody has made before"),
        ([["0F0"], ["0B0"]], r"stage 0 is on ranks 0 and 1[\s\S]*>0F0<[\s\S]*>0B0<"),
        ([["0F0", None, None, "0B0"], [None, "1F0", "1I0"]], "1B0 is not done once, whole or in halves"),
        ([["0F0", "F1"]], "rank 0 has 'F1' in step 1; a cell is such as 1F3 or 1SEND_F3"),
    ],
    ids=["missing", "twice", "same step", "early", "backward first", "two ranks", "half", "no cell"],
)
def test_check_schedule_rejects(grid, message):
    with pytest.raises(AssertionError, match=message):
        check_schedule(grid)


def test_check_schedule_rejects_activations_over_the_limit():
    grid = [["0F0", "0F1", "0B0", "0B1"]]
    check_schedule(grid, max_live=2)
    with pytest.raises(AssertionError, match="rank 0 holds 2 activations from step 1 on, the limit is 1"):
        check_schedule(grid, max_live=1)


def test_a_cell_of_two_passes_has_no_step():
    grid = [["0F0", "0F1", "(0F2;0B0)OVERLAP_F_B", "0B1", "0B2"]]
    check_schedule(grid, in_steps=False, max_live=3)
    with pytest.raises(AssertionError, match=r"in step 2, two passes in one step; pass in_steps=False"):
        check_schedule(grid)
    with pytest.raises(AssertionError, match="0F2 is done twice"):
        check_schedule([[*grid[0], "0F2"]], in_steps=False)


def test_stages_of_one_rank_send_nothing_to_each_other():
    """A V: rank 1 has the two stages in the middle."""
    ends = ["0F0", "0SEND_F0", "3RECV_F0", "3F0", "3B0", "3SEND_B0", "0RECV_B0", "0B0"]
    middle = ["1RECV_F0", "1F0", "2F0", "2SEND_F0", "2RECV_B0", "2B0", "1B0", "1SEND_B0"]
    check_schedule([["0UNSHARD", *ends, "0REDUCE_GRAD", "0RESHARD"], middle])
    with pytest.raises(AssertionError, match="rank 0 in 3F0 waits for 2F0"):
        check_schedule([[cell for cell in ends if cell != "3RECV_F0"], middle])


def test_check_schedule_does_not_decide_on_nothing():
    with pytest.raises(Inconclusive, match="schedule: the schedule is empty"):
        check_schedule([[None], []])


def test_check_schedule_rejects_orders_that_wait_for_one_another():
    with pytest.raises(AssertionError, match=r"rank 0 in 0B0 waits for 1B0; rank 1 in 1F1 waits for 0F1"):
        check_schedule([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], in_steps=False)


def test_check_schedule_rejects_messages_that_meet_head_to_head():
    """1F1B with blocking sends: each of two neighbours sends, and neither receives."""
    first = ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"]
    second = ["1RECV_F0", "1F0", "1B0", "1RECV_F1", "1SEND_B0", "1F1", "1B1", "1SEND_B1"]
    check_schedule([first, second])
    crossed = ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"]
    with pytest.raises(
        AssertionError, match=r"rank 0 in 0SEND_F1 waits for 1RECV_F1; rank 1 in 1SEND_B0 waits for 0RECV_B0"
    ):
        check_schedule([first, crossed])
    forgotten = [cell for cell in second if cell != "1RECV_F0"]
    with pytest.raises(AssertionError, match=r"rank 0 in 0SEND_F0 waits for 1RECV_F0; rank 1 in 1F0 waits for 0F0"):
        check_schedule([first, forgotten])
