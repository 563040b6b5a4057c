"""The error of a failed check: its fields, for tools, and its message, for people."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from pdlcheck.checks import check_all_reduce, check_gradients_equal_single_process, check_sampler, check_sharded_layer
from pdlcheck.checks.message import Place, failure
from pdlcheck.errors import CHECK_FIELDS, CheckFailed

EVERY_FIELD = {
    "subject": "sync",
    "rank": 1,
    "step": 2,
    "tensor": "gradient of 'weight'",
    "index": (0, 3),
    "found": 4.0,
    "expected": 2.0,
    "cause": "summed, not averaged",
    "evidence": "every rank holds 4.0",
    "case": "world=sim world_size=2",
    "replay": "pytest test_x.py --pdl-seed=1",
}


def test_check_failed_survives_pickling_with_its_fields_and_notes():
    error = CheckFailed("sync: rank 1 holds 4\n  case  world=sim", **EVERY_FIELD)
    error.add_note("of rank 1")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is CheckFailed
    assert str(again) == str(error)
    assert again.fields == EVERY_FIELD
    assert again.__notes__ == ["of rank 1"]


def test_fields_that_the_check_does_not_give_are_none():
    assert CheckFailed("wrong").fields == dict.fromkeys(CHECK_FIELDS)
    assert set(CHECK_FIELDS) == EVERY_FIELD.keys()


def test_failure_fills_the_fields_from_its_details():
    place = Place(rank=1, tensor="weight", index=(0,), found=torch.tensor(4.0), expected=torch.tensor(2.0), step=3)
    error = failure("sync: rank 1 holds 4", place, ranks=2, likely_cause="summed", evidence="4", case="world=sim")
    known = {"found": 4.0, "expected": 2.0, "index": (0,), "tensor": "weight", "rank": 1, "step": 3}
    words = {"subject": "sync", "cause": "summed", "evidence": "4", "case": "world=sim", "replay": None}
    assert error.fields == known | words
    assert "place" not in str(error)


@pytest.mark.parametrize(
    ("headline", "subject"),
    [
        ("sync: rank 0 holds 1", "sync"),
        ("wrap, buffers: rank 0 holds 1", "wrap"),
        ("the check of sync: rank 0", None),
        ("nothing", None),
    ],
)
def test_the_subject_is_the_name_before_the_colon(headline, subject):
    assert failure(headline).subject == subject


def test_a_value_that_is_no_number_becomes_text():
    error = failure("sync: wrong", Place(found=torch.ones(2), expected=object))
    assert error.found == "tensor([1., 1.])"
    assert isinstance(error.expected, str)


def test_a_wrong_collective_has_the_place_of_its_first_wrong_element(world):
    def twice(tensor):
        torch.distributed.all_reduce(tensor)
        if torch.distributed.get_rank() == 1:
            tensor[1] *= 2

    with pytest.raises(CheckFailed) as caught:
        check_all_reduce(twice, [torch.ones(2), torch.ones(2)], world)
    error = caught.value
    assert (error.subject, error.rank, error.index, error.found, error.expected) == ("twice", 1, (1,), 4.0, 2.0)
    assert error.cause is not None
    assert error.case == f"world={world.name} world_size=2 shape=(2,) dtype=torch.float32"


def test_a_wrong_gradient_has_its_name_and_the_number_of_the_call(world):
    def averaged(model):
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= 2

    def kept(model, num_samples):
        again = hasattr(model, "kept")
        averaged(model)
        if again:
            model.bias.grad += model.kept
        model.kept = model.bias.grad.clone()

    shards = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(2)]
    with pytest.raises(CheckFailed) as caught:
        check_gradients_equal_single_process(lambda: nn.Linear(3, 1), nn.MSELoss(), shards, kept, world)
    error = caught.value
    assert (error.rank, error.tensor, error.index, error.step) == (0, "gradient of 'bias'", (0,), 2)
    assert error.found == pytest.approx(1.5 * error.expected)


class Asserts(nn.Module):
    """A model with an assertion on the shape of its input, as models of libraries have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        assert x.dim() == 3, "expected samples, positions, features"
        return self.layer(x)


class AssertsItsLength(torch.utils.data.DistributedSampler):
    def __iter__(self):
        assert len(self) == 1000, "expected samples, all 1000 of them"
        return super().__iter__()


def of_a_model(world):
    shards = [(torch.ones(2, 3), torch.ones(2, 1)), (torch.zeros(2, 3), torch.ones(2, 1))]
    check_gradients_equal_single_process(Asserts, nn.MSELoss(), shards, lambda model, n: None, world)


def of_a_layer(world):
    check_sharded_layer(lambda whole: whole, Asserts, [torch.ones(2, 3)], world, world_size=2)


def of_a_sampler(world):
    check_sampler(AssertsItsLength, world, num_samples=10, world_size=2)


@pytest.mark.parametrize("check", [of_a_model, of_a_layer, of_a_sampler])
def test_an_assertion_of_the_program_is_no_verdict_of_the_check(world, check):
    with pytest.raises(AssertionError, match="expected samples, ") as raised:
        check(world)
    assert not isinstance(raised.value, CheckFailed)
    assert raised.value.__context__ is None  # the check did not go on
