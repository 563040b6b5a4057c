"""The check of a schedule rejects grids that cannot run."""

from __future__ import annotations

import pytest

from pdlcheck.checks import check_schedule
from pdlcheck.errors import Inconclusive


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([["0F0", None], [None, "1F0", "1B0"]], r"0B0 on rank 0 \(0F0 is in step 0\) is missing"),
        (
            [["0F0", "0F0", None, "0B0"], [None, "1F0", "1B0"]],
            r"0F0 is done twice: on rank 0 in step 0, on rank 0 in step 1\n[\s\S]*>0F0<  >0F0<",
        ),
        (
            [["0F0", None, None, "0B0"], ["1F0", None, "1B0"]],
            r"rank 1 does 1F0 in step 0, which reads 0F0, which rank 0 does in the same step; as orders the rows",
        ),
        (
            [["0F0", "0B0"], [None, "1F0", "1B0"]],
            r"rank 0 does 0B0 in step 1, which reads 1B0, which rank 1 does in step 2",
        ),
        ([["0B0", "0F0"]], r"rank 0 does 0B0 in step 0, which reads 0F0, which rank 0 does in step 1\n"),
        (
            [["0F0"], ["0B0"]],
            r"stage 0 is on ranks 0 and 1: rank 0 does 0F0 in step 0, rank 1 does 0B0 in s[\s\S]*>0F0<[\s\S]*>0B0<",
        ),
        ([["0F0", None, None, "0B0"], [None, "1F0", "1I0"]], r"1W0 on rank 1 \(1I0 is in step 2\) is missing"),
        ([["0F0", "F1"]], "rank 0 has 'F1' in step 1; a cell is such as 1F3 or 1SEND_F3"),
    ],
    ids=["missing", "twice", "same step", "early", "backward first", "two ranks", "half", "no cell"],
)
def test_check_schedule_rejects(grid, message):
    with pytest.raises(AssertionError, match=message):
        check_schedule(grid)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (["1I0", "1W0", "1I1"], r"1W1 on rank 1 \(1I1 is in step 5\) is missing"),
        (["1I0", "1W0", "1W1"], r"1I1 on rank 1 \(1W1 is in step 5\) is missing"),
        (["1B0", "1I1"], r"1W1 on rank 1 \(1I1 is in step 4\) is missing"),
        (["1I0", "1W0"], r"1I1 on rank 1 \(1F1 is in step 2\), 1W1 on rank 1 \(1F1 is in step 2\) are missing"),
        (["1B0"], r"1B1 or both halves on rank 1 \(1F1 is in step 2\) is missing"),
        (["1I0", "1W0", "1W1", "1I1"], r"rank 1 does 1W1 in step 5, which reads 1I1, which rank 1 does in step 6"),
        (
            ["1B0", "1I0", "1W1", "1I1"],
            r"rank 1 does 1B0 in step 3, the whole backward pass, and rank 1 does 1I0 in step 4",
        ),
        (
            ["1I1", "1W1", "1I0", "1W0"],
            r"rank 0 does 0W0 in step 5, which reads 1I0, which rank 1 does in the same step",
        ),
    ],
    ids=["no W", "no I", "no W, mixed", "neither", "no B", "W before I", "whole and half", "late"],
)
def test_halves_of_a_backward_pass_are_named(last, message):
    first = ["0F0", "0F1", None, None, None, "0W0", None, "0W1"]
    check_schedule([first, [None, "1F0", "1F1", "1I0", "1W0", "1I1", "1W1"]])
    with pytest.raises(AssertionError, match=message):
        check_schedule([first, [None, "1F0", "1F1", *last]])


def test_the_first_stage_may_do_without_the_gradient_of_its_input():
    """The first stage still needs the gradient of its weights."""
    last = [None, "1F0", "1I0", "1W0"]
    check_schedule([["0F0", None, None, "0W0"], last])
    check_schedule([["0F0", None, None, "0I0", "0W0"], last])
    with pytest.raises(AssertionError, match=r"0W0 on rank 0 \(0I0 is in step 3\) is missing"):
        check_schedule([["0F0", None, None, "0I0"], last])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("1B7", "rank 1 does 1B7 in step 4, the rest has micro-batches 0 to 1; 1B1 on rank 1"),
        ("7B1", "rank 1 does 7B1 in step 4, the rest has stages 0 to 1; 1B1 on rank 1"),
        ("1B0", "1B0 is done twice: on rank 1 in step 3, on rank 1 in step 4; 1B1 on rank 1"),
        ("0B1", "0B1 is done twice: .*; 1B1 on rank 1 .* missing; stage 0 is on rank 0, but rank 1 does 0B1 in step 4"),
    ],
)
def test_a_mistyped_number_is_named_and_does_not_make_the_schedule_larger(wrong, message):
    grid = [["0F0", "0F1", None, "0B0", "0B1"], [None, "1F0", "1F1", "1B0", wrong]]
    with pytest.raises(AssertionError, match=message):
        check_schedule(grid)


def test_check_schedule_rejects_activations_over_the_limit():
    grid = [["0F0", "0F1", "0B0", "0B1"]]
    check_schedule(grid, max_live=2)
    with pytest.raises(AssertionError, match="rank 0 holds 2 activations from 0F1 in step 1 on, the limit is 1"):
        check_schedule(grid, max_live=1)
    with pytest.raises(ValueError, match="max_live has 2 numbers, the schedule 1 ranks"):
        check_schedule(grid, max_live=[2, 2])


def test_ranks_of_a_mapping_keep_their_numbers():
    with pytest.raises(
        AssertionError, match=r"rank 3 does 1B0 in step 0, which reads 1F0, which rank 3 does in step 1"
    ):
        check_schedule({0: ["0F0", None, "0B0"], 3: ["1B0", "1F0"]})


def test_a_cell_of_two_passes_has_no_step():
    grid = [["0F0", "0F1", "(0F2;0B0)OVERLAP_F_B", "0B1", "0B2"]]
    check_schedule(grid, in_steps=False, max_live=3)
    with pytest.raises(AssertionError, match=r"in step 2, two passes in one step; pass in_steps=False"):
        check_schedule(grid)
    with pytest.raises(AssertionError, match=r"0F2 is done twice: on rank 0 in step 2, on rank 0 in step 5"):
        check_schedule([[*grid[0], "0F2"]], in_steps=False)
    with pytest.raises(AssertionError, match=r"3 activations from 0F2 in step 2 on, the limit is 2[\s\S]*>0F2;0B0<"):
        check_schedule(grid, in_steps=False, max_live=2)


def test_stages_of_one_rank_send_nothing_to_each_other():
    """The stages form a V: rank 1 has the two in the middle."""
    ends = ["0F0", "0SEND_F0", "3RECV_F0", "3F0", "3B0", "3SEND_B0", "0RECV_B0", "0B0"]
    middle = ["1RECV_F0", "1F0", "2F0", "2SEND_F0", "2RECV_B0", "2B0", "1B0", "1SEND_B0"]
    check_schedule([["0UNSHARD", *ends, "0REDUCE_GRAD", "0RESHARD"], middle])
    with pytest.raises(
        AssertionError, match=r"rank 0 in 3F0 \(step 2\) waits for 3RECV_F0 \(nobody does it\); rank 1 in 2SEND_F0"
    ):
        check_schedule([[cell for cell in ends if cell != "3RECV_F0"], middle])


def test_check_schedule_does_not_decide_on_nothing():
    with pytest.raises(Inconclusive, match="schedule: the schedule is empty"):
        check_schedule([[None], []])


def test_check_schedule_rejects_orders_that_wait_for_one_another():
    orders = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    cycle = r"rank 0 in 0B0 \(step 1\) waits for 1B0 \(rank 1, step 2\); rank 1 in 1F1 \(step 1\) waits for 0F1"
    with pytest.raises(AssertionError, match=cycle):
        check_schedule(orders, in_steps=False)


def test_those_that_only_wait_for_the_others_are_not_accused():
    orders = [["0B0", "0F0"], ["1F0", "1B0"], ["2F0", "2B0"]]
    text = r"ever: rank 0 in 0B0 \(step 0\) waits for 0F0 \(rank 0 itself, step 1\); ranks 1, 2 wait for them"
    with pytest.raises(AssertionError, match=text):
        check_schedule(orders, in_steps=False)


def test_check_schedule_rejects_messages_that_meet_head_to_head():
    """1F1B with blocking sends: two neighbours send to each other, and neither receives."""
    first = ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"]
    second = ["1RECV_F0", "1F0", "1B0", "1RECV_F1", "1SEND_B0", "1F1", "1B1", "1SEND_B1"]
    check_schedule([first, second])
    crossed = ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"]
    with pytest.raises(
        AssertionError,
        match=r"rank 0 in 0SEND_F1 \(step 3\) waits for 1RECV_F1 \(rank 1, step 4\); "
        r"rank 1 in 1SEND_B0 \(step 3\) waits for 0RECV_B0 \(rank 0, step 4\)",
    ):
        check_schedule([first, crossed])
    forgotten = [cell for cell in second if cell != "1RECV_F0"]
    with pytest.raises(
        AssertionError,
        match=r"rank 0 in 0SEND_F0 \(step 1\) waits for 1RECV_F0 \(nobody does it\); "
        r"rank 1 in 1F0 \(step 0\) waits for 1RECV_F0 \(nobody does it\)",
    ):
        check_schedule([first, forgotten])
    with pytest.raises(
        AssertionError, match="rank 1 does 1SEND_F0 in step 8, a message to nowhere: there are stages 0 t"
    ):
        check_schedule([first, [*second, "1SEND_F0"]])
