"""The engine for likely causes: which candidates fit, how many, and what is excluded."""

from __future__ import annotations

import pytest
import torch

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.message import failure
from pdlcheck.checks.tolerances import Tolerance, distance

RIGHT = torch.tensor([2.0, -4.0, 0.5])
SUMMED = Candidate("it is summed: not averaged", lambda: RIGHT * 3)
HALVED = Candidate("it is divided by 2: once too often", lambda: RIGHT / 2)
ZERO = Candidate("it is zero: lost", lambda: torch.zeros(3))
FACTORS = [SUMMED, HALVED, ZERO]


def test_a_candidate_that_predicts_what_was_found_is_the_cause():
    diagnosis = explain(RIGHT * 3, FACTORS, expected=RIGHT)
    assert diagnosis == Diagnosis(fits=(SUMMED.text,))
    assert str(diagnosis) == diagnosis.cause == SUMMED.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_the_rounding_of_the_dtype_is_allowed_and_no_more(dtype):
    right = torch.linspace(1, 2, 7, dtype=torch.float64)
    tolerance = Tolerance.of(dtype)
    table = [Candidate("summed", lambda: (right * 3).to(dtype))]
    rounded = (right.to(dtype) * 3 / 7 * 7).to(dtype)
    assert explain(rounded, table, tolerance=tolerance, expected=right.to(dtype)).cause == "summed"
    off = (right * 3 * (1 + 4 * tolerance.relative)).to(dtype)
    assert explain(off, table, tolerance=tolerance, expected=right.to(dtype)).cause is None


def test_integers_are_exact_beyond_the_range_of_float64():
    held = torch.tensor([2**60 + 1])
    assert explain(held, [Candidate("same", lambda: torch.tensor([2**60]))]).cause is None
    assert explain(held, [Candidate("same", lambda: torch.tensor([2**60 + 1]))]).cause == "same"
    assert Tolerance.of(torch.int64) == Tolerance()


def test_one_element_that_a_candidate_does_not_explain_excludes_it():
    held = RIGHT * 3
    held[1] += 1
    assert explain(held, FACTORS, expected=RIGHT).cause is None


def test_right_elements_need_no_explanation():
    held = RIGHT.clone()
    held[:2] *= 3
    assert explain(held, FACTORS, expected=RIGHT).cause is None
    assert explain(held, FACTORS, expected=RIGHT, wrong=held != RIGHT).cause == SUMMED.text


def test_every_named_tensor_must_be_explained():
    right = {"weight": RIGHT, "bias": torch.ones(2)}
    table = [Candidate("summed", lambda: {name: one * 3 for name, one in right.items()})]
    held = {name: one * 3 for name, one in right.items()}
    assert explain(held, table, expected=right).cause == "summed"
    assert explain(held | {"bias": torch.ones(2) * 2}, table, expected=right).cause is None
    assert explain(held | {"other": RIGHT}, table).cause is None
    assert explain({"bias": held["bias"]}, table, expected=right).cause == "summed"


def test_tolerances_may_be_given_by_name():
    held = {"weight": RIGHT * 3 + 0.1, "bias": RIGHT * 3}
    table = [Candidate("summed", lambda: {"weight": RIGHT * 3, "bias": RIGHT * 3})]
    wide, narrow = Tolerance(absolute=0.2), Tolerance()
    assert explain(held, table, tolerance={"weight": wide, "bias": narrow}).cause == "summed"
    assert explain(held, table, tolerance={"weight": narrow, "bias": wide}).cause is None


def test_two_causes_that_fit_are_both_said_with_their_number():
    twin = Candidate("it was reduced 3 times", lambda: RIGHT + RIGHT + RIGHT)
    diagnosis = explain(RIGHT * 3, [*FACTORS, twin, twin], expected=RIGHT)
    assert diagnosis.cause == "2 causes fit: (1) it is summed: not averaged; (2) it was reduced 3 times"


def test_of_many_causes_that_fit_three_are_listed():
    table = [Candidate(f"cause {number}", lambda: RIGHT * 3) for number in range(5)]
    assert explain(RIGHT * 3, table).cause == ("5 causes fit: (1) cause 0; (2) cause 1; (3) cause 2; and 2 more")


def test_a_later_table_is_tried_only_if_no_earlier_candidate_fits():
    tried = []

    def costly():
        tried.append(1)
        return RIGHT * 5

    later = [Candidate("rare", costly)]
    assert explain(RIGHT * 3, FACTORS, later, expected=RIGHT).cause == SUMMED.text
    assert not tried
    assert explain(RIGHT * 5, FACTORS, later, expected=RIGHT).cause == "rare"


def test_without_a_cause_the_excluded_ones_are_named():
    more = [Candidate(f"cause {number}: of many", lambda: RIGHT * 7) for number in range(4)]
    diagnosis = explain(RIGHT + 1, [*FACTORS, *more], expected=RIGHT)
    assert diagnosis.cause is None
    assert str(diagnosis) == ('no known cause fits; excluded: "summed", "divided by 2", "zero" and 4 more')


def test_a_hint_is_a_note_and_no_cause():
    hints = [
        Candidate("samples see each other", holds=lambda held: True),
        Candidate("all are negative", holds=lambda held: bool((held < 0).all())),
    ]
    diagnosis = explain(RIGHT + 1, FACTORS, expected=RIGHT, hints=hints)
    assert diagnosis.cause is None
    assert str(diagnosis).endswith('"zero"; note: samples see each other')
    assert explain(RIGHT * 3, FACTORS, expected=RIGHT, hints=hints).hints == ()


def test_a_diagnosis_without_a_cause_is_a_line_of_the_message_and_no_field():
    error = failure("sync: wrong", likely_cause=explain(RIGHT + 1, FACTORS))
    assert error.cause is None
    assert "  likely cause  no known cause fits; excluded: " in str(error)
    assert failure("sync: wrong", likely_cause=explain(RIGHT * 3, FACTORS)).cause == SUMMED.text


def test_a_factor_of_one_explains_nothing():
    held = RIGHT + 1e-3
    table = [Candidate("it is world_size = 1 times too large", lambda: RIGHT * 1)]
    assert explain(held, table, tolerance=Tolerance(absolute=1e-2), expected=RIGHT).cause is None


def test_no_factor_explains_a_value_where_zero_is_right():
    zero = torch.zeros(3)
    table = [Candidate(f"{factor} times", lambda factor=factor: zero * factor) for factor in (0, 1, 2, 0.5)]
    wide = Tolerance(absolute=1e-2)
    assert explain(torch.full((3,), 1e-3), table, tolerance=wide, expected=zero).cause is None


def test_what_is_zero_is_explained_by_zero_alone_and_by_no_small_factor():
    right = torch.full((3,), 1e-3)
    table = [Candidate(f"{factor} times", lambda factor=factor: right * factor) for factor in (0.0, 0.01, 1.0, 2.0)]
    assert explain(torch.zeros(3), table, tolerance=Tolerance(absolute=1e-2), expected=right).cause == "0.0 times"


def test_a_prediction_hardly_better_than_the_right_value_explains_nothing():
    tolerance = Tolerance(absolute=1.0)
    table = [Candidate("it is 1.1 times too large", lambda: RIGHT * 1.1)]
    assert explain(RIGHT + 0.9, table, tolerance=tolerance, expected=RIGHT).cause is None
    halfway = [Candidate("halfway", lambda: RIGHT + 0.45)]
    assert explain(RIGHT + 0.9, halfway, tolerance=tolerance, expected=RIGHT).cause is None
    assert explain(RIGHT * 1.1, table, tolerance=tolerance, expected=RIGHT).cause == "it is 1.1 times too large"


def test_a_prediction_of_another_shape_is_excluded():
    assert explain(RIGHT, [Candidate("a row", lambda: RIGHT[None])]).cause is None
    assert explain(torch.zeros(2), [Candidate("a scalar", lambda: torch.zeros(()))]).cause is None


def test_a_predicate_is_asked_about_the_evidence():
    table = [
        Candidate("ranks differ", holds=lambda ranks: len(set(ranks)) > 1),
        Candidate("all are idle", holds=lambda ranks: set(ranks) == {"idle"}),
    ]
    assert explain(["idle", "idle"], table).cause == "all are idle"
    assert explain(["idle", "busy"], table).cause == "ranks differ"


def test_numbers_are_compared_as_tensors_are():
    table = [Candidate("not divided by 4", lambda: 8.0)]
    assert explain(8.0 + 1e-12, table, tolerance=Tolerance(relative=1e-9), expected=2.0).cause == "not divided by 4"
    assert explain(8.1, table, tolerance=Tolerance(relative=1e-9), expected=2.0).cause is None


def test_nan_and_infinity_are_explained_by_themselves_alone():
    held = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert explain(held, [Candidate("overflow", held.clone)], expected=RIGHT).cause == "overflow"
    assert explain(held, [Candidate("summed", lambda: RIGHT)], tolerance=Tolerance(absolute=1e300)).cause is None
    assert distance(torch.tensor([torch.inf]), torch.tensor([1.0])).item() == torch.inf


@pytest.mark.parametrize("both", [{}, {"predict": lambda: RIGHT, "holds": bool}])
def test_a_candidate_has_either_a_prediction_or_a_predicate(both):
    with pytest.raises(TypeError, match="either predict= or holds="):
        Candidate("text", **both)
