"""The table of private names: what is missing is found, and each use of it says what does not work."""

from __future__ import annotations

import functools
import sys

import pytest

from pdlcheck.compat import private
from pdlcheck.compat.private import (
    LIBRARIES,
    MissingName,
    MissingNameWarning,
    PrivateName,
    installed_libraries,
    missing,
    name,
    names,
    take,
    uses,
    warn_of_missing,
)


@pytest.fixture(autouse=True)
def _own_table(monkeypatch):
    monkeypatch.setattr(private, "_registered", dict(private._registered))
    monkeypatch.setattr(private, "_warned_of", set())


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_libraries_have_every_name(library):
    assert names(library)
    assert missing(library) == []


@pytest.mark.parametrize(
    "path",
    [
        "torch._C._no_such_function",
        "torch.distributed.no_such_module._name",
        "torch.nn.Module._no_such_attribute",
        "_pytest.fixtures.FixtureDef._no_such_attribute",
        "no_such_package._name",
        "_pytest.tmpdir.pytest_configure._no_such_attribute",
        "_pytest.fixtures.FixtureDef._old or _pytest.fixtures.FixtureDef._older",
    ],
)
def test_a_name_that_is_not_there_is_missing(path):
    assert not PrivateName(path, "a test", "nothing").is_there()


@pytest.mark.parametrize(
    "path",
    [
        "torch._C._len_torch_dispatch_stack",  # a function
        "torch.Tensor._version",  # a property of a class that is written in C++
        "torch.nn.Module._buffers",  # an attribute that __init__ sets
        "torch.distributed.rendezvous._create_c10d_store",  # a function of the package has the module's name
        "_pytest.fixtures.FixtureDef._finalizers",
        "_pytest.main.Session._setupstate",  # an annotation
        "_pytest.python.PyobjMixin._obj",  # an attribute that a property sets
        "_pytest.tmpdir.pytest_configure._tmp_path_factory",  # an attribute that a function sets, by a string
        "hypothesis.settings.__call__._hypothesis_internal_use_settings",  # an attribute that a method sets
        "_pytest.fixtures.FixtureDef._no_such_attribute or _pytest.fixtures.FixtureDef._finalizers",
    ],
)
def test_a_name_that_is_there_is_found(path):
    assert PrivateName(path, "a test", "nothing").is_there()


def test_an_attribute_is_found_behind_a_stand_in_for_the_method_that_sets_it(monkeypatch):
    real = pytest.MonkeyPatch.__init__

    @functools.wraps(real)
    def stand_in(self):
        real(self)

    monkeypatch.setattr(pytest.MonkeyPatch, "__init__", stand_in)
    assert PrivateName("_pytest.monkeypatch.MonkeyPatch._setattr", "a test", "nothing").is_there()


def test_missing_lists_a_registered_name_that_the_library_lacks():
    row = name("torch._C._no_such_function", "a test", lost="nothing")
    assert missing("torch") == [row]


def test_a_missing_value_raises_when_it_is_used_and_names_the_cure():
    value = take("torch._C._no_such_function", "the depth of the stack", lost="modes of a test stay on")
    message = (
        r"^torch 2\.\S+ has no torch\._C\._no_such_function\. pdlcheck uses it for: the depth of the stack\. "
        r"Without it: modes of a test stay on\. Install another version of either; pdlcheck doctor lists"
    )
    with pytest.raises(MissingName, match=message):
        value()
    with pytest.raises(MissingName, match=message):
        _ = value.attribute
    with pytest.raises(MissingName, match=message):
        isinstance(1, value)
    with pytest.raises(MissingName, match=message):

        class Subclass(value):
            pass


def test_a_name_has_the_present_value(monkeypatch):
    import torch

    row = name("torch._C._get_tracing_state", "a test", lost="nothing")
    assert row.value is torch._C._get_tracing_state
    monkeypatch.setattr(torch._C, "_get_tracing_state", print)
    assert row.value is print
    with pytest.raises(MissingName, match=r"has no torch\._C\._no_such_function"):
        name("torch._C._no_such_function", "a test", lost="nothing").value()


def test_a_value_that_is_there_is_the_librarys_own():
    import torch

    assert take("torch._C._get_tracing_state", "a test", lost="nothing") is torch._C._get_tracing_state


def test_a_function_registers_what_it_reads_with_its_docstring(monkeypatch):
    monkeypatch.delitem(private._registered, "torch.nn.Module._buffers", raising=False)  # modules.py has it

    @uses("torch.nn.Module._buffers", lost="buffers are not compared")
    def buffers(module):
        """Return the buffers by name.

        More text.
        """
        return module._buffers

    row = PrivateName("torch.nn.Module._buffers", "Return the buffers by name.", "buffers are not compared")
    assert row in names("torch")


def test_a_function_for_other_versions_registers_nothing():
    @uses("torch.nn.Module._of_later_versions", lost="nothing", when=False)
    def later(module):
        """Return something."""

    assert "torch.nn.Module._of_later_versions" not in [row.path for row in names("torch")]


def test_a_library_that_is_not_installed_lacks_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest_benchmark", None)  # an import fails
    assert "pytest_benchmark" not in installed_libraries()
    assert names("pytest_benchmark")
    assert missing("pytest_benchmark") == []


def test_a_warning_names_what_is_missing_once():
    name("torch._C._no_such_function", "Count the modes.", lost="the modes of a test")
    name("torch._C._no_such_other", "a test", lost="nothing")
    with pytest.warns(MissingNameWarning) as warned:
        warn_of_missing("torch")
    (text,) = [str(one.message) for one in warned]
    first, *lines, last = text.splitlines()
    assert first.startswith("torch 2.")
    assert first.endswith(" lacks private names that pdlcheck uses:")
    assert lines == [
        "  torch._C._no_such_function: Count the modes. Without it: the modes of a test.",
        "  torch._C._no_such_other: a test. Without it: nothing.",
    ]
    assert last.startswith("Install another version of torch or of pdlcheck; pdlcheck doctor lists all names")
    warn_of_missing("torch")  # warnings are errors here


def test_a_warning_may_be_issued_by_another_function():
    name("torch._C._no_such_function", "a test", lost="nothing")
    warned = []
    warn_of_missing("torch", warned.append, only_registered=True)
    assert [type(one) for one in warned] == [MissingNameWarning]


def test_a_name_is_registered_once():
    name("torch._C._once", "a test", lost="nothing")
    message = r"the private name torch\._C\._once is registered twice; import it from where"
    with pytest.raises(ValueError, match=message):
        name("torch._C._once", "another test", lost="nothing")
