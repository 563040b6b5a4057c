"""Ranks that communicate in the order of a set get a warning on sim, where all of them share one order."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import SetOrderWarning
from pdlcheck.worlds import get_world

NAMES = {"first layer", "second layer", "third layer"}
NUMBERS = {1, 2, 3}
SHAPES = {(1, 2), (3, 4)}


class Model:
    shared = frozenset(NAMES)

    def __init__(self):
        self.names = NAMES

    @property
    def computed(self):
        raise AssertionError("nothing is called to find out")

    def own(self):
        for name in self.names:
            reduce(name)

    def of_class(self):
        for name in self.shared:
            reduce(name)


def reduce(name):
    dist.all_reduce(torch.ones(1))


def a_global():
    for name in NAMES:
        reduce(name)


def a_local():
    names = {"first", "second"}
    for name in names:
        dist.all_reduce(torch.ones(len(name)))


def a_display():
    for name in {"first", "second"}:
        reduce(name)


def a_call():
    for name in set(["first", "second"]):  # noqa: C405 - as a program may write it
        reduce(name)


def a_comprehension():
    [reduce(name) for name in NAMES]


def enumerated():
    for number, name in enumerate(NAMES):
        reduce((number, name))


def a_list_of_it():
    for name in list(NAMES):
        reduce(name)


def an_intersection():
    for name in NAMES & {"first layer", "third layer"}:
        reduce(name)


def keys_in_common():
    one, two = dict.fromkeys(sorted(NAMES)), dict.fromkeys(sorted(NAMES))
    for name in one.keys() & two.keys():
        reduce(name)


def a_union():
    for name in NAMES.union({"fourth"}):
        reduce(name)


def objects():
    for one in {Model(), Model()}:
        reduce(one)


def of_an_attribute():
    Model().own()


def of_a_class():
    Model().of_class()


def pairs():
    for one, other in {("a", 1), ("b", 2)}:
        reduce((one, other))


WRONG = [
    *(a_global, a_local, a_display, a_call, a_comprehension, enumerated, a_list_of_it, an_intersection),
    *(keys_in_common, a_union, objects, of_an_attribute, of_a_class, pairs),
]


def in_order():
    for name in sorted(NAMES):
        reduce(name)


def numbers():
    for number in NUMBERS:
        reduce(number)


def pairs_of_numbers():
    for one, other in SHAPES:
        reduce((one, other))


def of_a_list():
    for name in ["first", "second"]:
        reduce(name)


def of_a_dict():
    for name in {"first": 1, "second": 2}:
        reduce(name)


def of_one_element():
    for name in {"alone"}:
        reduce(name)
        reduce(name)


def barriers():
    for _ in NAMES:
        dist.barrier()


def after_the_loop():
    lengths = 0
    for name in NAMES:
        lengths += len(name)
    reduce(lengths)


def in_the_loop_of_another_function():
    def inner(names):
        return [name.upper() for name in names]

    inner(NAMES)
    reduce("once")


def a_name_of_the_users():
    def set(names):
        return sorted(names)

    for name in set(NAMES):
        reduce(name)


def computed():
    model = Model()
    for name in model.names and ["first", "second"]:
        reduce(name)


RIGHT = [
    *(in_order, numbers, pairs_of_numbers, of_a_list, of_a_dict, of_one_element, barriers, after_the_loop),
    *(in_the_loop_of_another_function, a_name_of_the_users, computed),
]


@pytest.mark.parametrize("program", WRONG)
def test_ranks_that_communicate_in_the_order_of_a_set_are_warned_of_once(program):
    with pytest.warns(SetOrderWarning, match=r"post all_reduce in the order of a set: `for .* in .*` at .*sorted"):
        get_world("sim").run(program, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SetOrderWarning)
        get_world("sim").run(program, world_size=2)


@pytest.mark.parametrize("program", RIGHT)
def test_orders_that_are_the_same_in_every_process_are_not_warned_of(program):
    with warnings.catch_warnings():
        warnings.simplefilter("error", SetOrderWarning)
        get_world("sim").run(program, world_size=2)


def test_one_rank_alone_has_one_order():
    def body():
        for name in {"alone", "and", "unwarned"}:
            reduce(name)

    with warnings.catch_warnings():
        warnings.simplefilter("error", SetOrderWarning)
        get_world("sim").run(body, world_size=1)


def test_a_body_of_a_test_is_warned_of_and_its_line_named(run):
    source = "@W\ndef test_it(rank):\n    for name in {'a', 'b'}:\n        dist.all_reduce(torch.ones(1))\n"
    result = run(source, "-W", "default", world="sim")
    result.assert_outcomes(passed=1, warnings=1)
    line = "`for name in {'a', 'b'}` at test_inner.py:6."
    result.stdout.fnmatch_lines([f"*SetOrderWarning: ranks post all_reduce in the order of a set: {line}*"])


def test_many_ranks_and_a_loop_that_was_over_a_list_before():
    def body():
        for names in [["first"]] * 4 + [{"first layer", "second layer"}]:
            for name in names:
                reduce(name)

    with pytest.warns(SetOrderWarning, match=r"`for name in names` at "):
        get_world("sim").run(body, world_size=32)


def test_a_line_that_is_reached_from_one_caller_is_examined_in_its_first_posts():
    def one(name):
        reduce(name)

    def body():
        for number in range(80):
            one(number)
        for name in {"first", "second", "third"}:
            one(name)

    with warnings.catch_warnings():
        warnings.simplefilter("error", SetOrderWarning)
        get_world("sim").run(body, world_size=2)


def test_another_caller_of_a_line_is_examined_anew():
    def body():
        for number in range(80):
            reduce(number)
        for name in {"first after many", "second after many"}:
            reduce(name)

    with pytest.warns(SetOrderWarning, match=r"`for name in \{'first after many', 'second after many'\}` at "):
        get_world("sim").run(body, world_size=2)
