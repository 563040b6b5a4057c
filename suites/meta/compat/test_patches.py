"""Patches are in force inside of their block, and leave nothing behind."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest

from pdlcheck.compat.patches import ABSENT, Patch, Patches


class Base:
    def answer(self):
        return 1


class Derived(Base):
    pass


@pytest.fixture
def importer(monkeypatch):
    """Return a module that has imported math.sqrt by name."""
    module = ModuleType("importer")
    module.root = math.sqrt
    monkeypatch.setitem(sys.modules, "importer", module)
    return module


def minus_one(x):
    return -1


SQRT = Patch(math, "sqrt", lambda real: minus_one, "a test", everywhere=True)


def test_a_patch_holds_inside_of_its_block_alone():
    with Patches([SQRT]):
        assert math.sqrt(4) == -1
    assert math.sqrt(4) == 2


def test_a_block_inside_of_the_block_changes_nothing():
    table = Patches([SQRT])
    with table:
        with table:
            pass
        assert math.sqrt(4) == -1
    assert math.sqrt(4) == 2


def test_a_module_that_imported_the_name_gets_the_stand_in_and_the_real_value_back(importer):
    with Patches([SQRT]):
        assert importer.root(4) == -1
    assert importer.root(4) == 2


def test_a_module_that_is_imported_inside_of_the_block_has_the_real_value_afterwards(monkeypatch):
    late = ModuleType("late")
    with Patches([SQRT]):
        late.root = math.sqrt
        monkeypatch.setitem(sys.modules, "late", late)
    assert late.root(4) == 2


def test_a_module_that_grew_since_the_last_block_gets_the_stand_in(monkeypatch):
    growing = ModuleType("growing")
    growing.__spec__ = type("Spec", (), {"_initializing": True})
    monkeypatch.setitem(sys.modules, "growing", growing)
    table = Patches([SQRT])
    with table:
        pass
    growing.root = math.sqrt
    with table:
        assert growing.root(4) == -1


def test_an_inherited_method_is_inherited_again():
    with Patches([Patch(Derived, "answer", lambda real: lambda self: real(self) + 1, "a test")]):
        assert (Derived().answer(), Base().answer()) == (2, 1)
    assert Derived().answer() == 1
    assert "answer" not in vars(Derived)


def test_an_attribute_that_was_not_there_is_gone_afterwards():
    def make(real):
        assert real is ABSENT
        return 5

    with Patches([Patch(Derived, "new", make, "a test")]):
        assert Derived.new == 5
    assert not hasattr(Derived, "new")


def test_the_class_of_an_object_can_be_exchanged():
    one = Base()
    with Patches([Patch(one, "__class__", lambda real: Derived, "a test")]):
        assert type(one) is Derived
    assert type(one) is Base


def test_the_patch_of_a_module_that_no_program_imports_waits(monkeypatch):
    late = ModuleType("a_late_module")
    late.value = 1
    table = Patches([Patch("a_late_module", "value", lambda real: real + 1, "a test")])
    with table:
        monkeypatch.setitem(sys.modules, "a_late_module", late)
        assert late.value == 1
        table.put_late()
        assert late.value == 2
    assert late.value == 1


def test_a_row_that_is_added_inside_of_the_block_is_in_force_at_once():
    table = Patches([])
    with table:
        table.add(SQRT)
        assert math.sqrt(4) == -1
    assert math.sqrt(4) == 2


def test_what_a_program_has_put_in_the_place_of_a_stand_in_stays():
    with Patches([Patch(Derived, "answer", lambda real: lambda self: 2, "a test")]):
        Derived.answer = lambda self: "theirs"
    assert Derived().answer() == "theirs"
    del Derived.answer


def test_a_stand_in_that_a_program_puts_back_later_is_taken_back_by_the_next_block():
    real, table = math.sqrt, Patches([SQRT])
    with table:
        read = math.sqrt
    math.sqrt = read
    with table:
        assert math.sqrt(4) == -1
    assert math.sqrt is real


def test_a_row_whose_stand_in_is_the_real_value_exchanges_nothing():
    real = math.sqrt
    with Patches([Patch(math, "sqrt", lambda real: real, "a test")]):
        assert math.sqrt is real


def test_the_module_that_defines_a_stand_in_keeps_it():
    with Patches([SQRT]):
        pass
    assert minus_one(4) == -1


def test_a_value_that_was_read_before_the_block_has_a_stand_in():
    real, table = math.sqrt, Patches([SQRT])
    assert table.stand_in(real) is real
    with table:
        assert table.stand_in(real) is minus_one
        assert table.stand_in(len) is len


def test_a_table_that_is_kept_stays_in_force_until_it_is_taken_back():
    table = Patches([SQRT], keep=True)
    with table:
        table.take_back()
        assert math.sqrt(4) == -1, "not inside of the block"
    assert math.sqrt(4) == -1
    table.take_back()
    assert math.sqrt(4) == 2
    with table:
        assert math.sqrt(4) == -1
    table.take_back()


def test_a_real_value_that_a_program_puts_back_has_its_stand_in_again_in_the_next_block():
    real, table = math.sqrt, Patches([SQRT], keep=True)
    with table:
        pass
    math.sqrt = real
    with table:
        assert math.sqrt(4) == -1
    table.take_back()
    assert math.sqrt is real


def test_an_error_ends_the_block_like_any_other():
    with pytest.raises(ValueError, match="from inside"), Patches([SQRT]):
        raise ValueError("from inside")
    assert math.sqrt(4) == 2
