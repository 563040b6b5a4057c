"""Values between the controller and the ranks: Python's own types by a short way, all others by pickle."""

from __future__ import annotations

import os
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from pdlcheck.worlds.processes.controller.controller_environment import import_path
from pdlcheck.worlds.processes.exchange.payload import dump_result


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [None, 1.5, b"x", {"a": [1, (2, "b")], 3: {"c": ()}}, nested(3), nested(100), {1, 2}, [os.path]], ids=repr
)
def test_a_value_comes_back(value):
    copy = pickle.loads(dump_result(value, 0))
    assert copy == value
    assert type(copy) is type(value)


def test_a_list_that_holds_itself_comes_back():
    own: list[object] = []
    own.append(own)
    copy = pickle.loads(dump_result(own, 0))
    assert copy[0] is copy


@pytest.mark.parametrize("kind", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_module_with_parametrized_tensors_comes_back(kind):
    """The class of such a module is made for it, and refuses to be pickled."""
    model = nn.Sequential(kind(nn.Linear(3, 2)), nn.Tanh()).eval()
    again = pickle.loads(dump_result({"models": [model, model]}, 0))["models"]
    assert again[0] is again[1]
    assert {name: one.tolist() for name, one in again[0].state_dict().items()} == {
        name: one.tolist() for name, one in model.state_dict().items()
    }
    x = torch.ones(1, 3)
    assert torch.equal(again[0](x), model(x))
    with torch.no_grad():
        for parameter in again[0].parameters():
            parameter.mul_(2)
    assert not torch.equal(again[0](x), model(x))


def test_a_function_without_a_name_in_a_list_comes_back():
    assert pickle.loads(dump_result([lambda: 3], 0))[0]() == 3


def test_the_import_path_means_the_same_in_another_directory(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    whole, crooked = str(tmp_path), f"{tmp_path}/here/.."
    monkeypatch.setattr(sys, "path", ["", "here", "absent", whole, crooked, "/absent/../hook"])
    expected = (whole, f"{whole}/here", "absent", whole, whole, "/absent/../hook")
    assert import_path() == expected
    (tmp_path / "absent").mkdir()
    assert import_path()[2] == f"{whole}/absent"
