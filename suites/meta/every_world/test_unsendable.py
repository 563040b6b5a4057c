"""Arguments and results that cannot be pickled: the error names the argument, its type, and the part that fails."""

from __future__ import annotations

import re
import threading

import pytest
import torch

CURE = "create it inside the function, or pass what it is made of"
LOCK = "TypeError: cannot pickle '_thread.lock' object"


class Holder:
    def __init__(self):
        self.lock = threading.Lock()
        self.weight = torch.ones(2)


class Refuses:
    def __reduce__(self):
        raise RuntimeError("stays here")


def take(first, *others, config=None):
    return 1


@pytest.mark.parametrize(
    ("args", "kwargs", "name", "words"),
    [
        ([threading.Lock()], {}, "'first'", f"first is a lock: {LOCK}"),
        ([1, 2, threading.Lock()], {}, "2", f"2 is a lock: {LOCK}"),
        ([1], {"config": Holder()}, "'config'", f"config is a Holder, config.lock a lock: {LOCK}"),
        ([{"k": [0, Holder()]}], {}, "'first'", f"first is a dict, first['k'][1].lock a lock: {LOCK}"),
        ([[Refuses()]], {}, "'first'", "first is a list, first[0] a Refuses: RuntimeError: stays here"),
    ],
    ids=["itself", "without a name", "attribute", "deep", "refuses"],
)
def test_an_argument_is_named(world, args, kwargs, name, words):
    told = re.escape(f"argument {name} of take cannot be sent to the ranks: {words}; {CURE}")
    with pytest.raises(TypeError, match=f"^{told}") as caught:
        world.run(take, *args, **kwargs, world_size=2)
    chained = caught.value.__cause__
    assert (chained is not None) == ("Refuses" in words), "only what happened in code of the user's is shown"
    assert world.run(take, 1, world_size=2) == [1, 1]


def test_a_world_is_no_argument(world):
    with pytest.raises(TypeError, match="a world cannot be sent to its ranks; inside the function use"):
        world.run(take, world, world_size=2)


def test_what_travels_is_no_trouble(world):
    def number():
        return 3

    weight = torch.ones(2, requires_grad=True)
    assert world.run(lambda fn, *others: fn(), number, weight, {"a": (Holder, lambda: 1)}, world_size=2) == [3, 3]
