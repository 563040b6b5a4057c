"""The line of a rank that does not end: the user's, even if libraries stand between it and torch."""

from __future__ import annotations

import importlib
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import typing_extensions

from pdlcheck.worlds.observe.callsite import declare_wrappers
from pdlcheck.worlds.stack_position import place_of


def line():
    return f"{Path(__file__).name}:{sys._getframe(1).f_lineno}"


def test_a_deprecated_name_stands_for_the_line_that_calls_it():
    where = partial(place_of, threading.get_ident())
    with pytest.warns(DeprecationWarning, match="an older name"):
        place, here = typing_extensions.deprecated("an older name")(where)(), line()
    assert place.words.startswith("at ")
    assert place.words.endswith(here)


@pytest.mark.parametrize(("is_declared", "named"), [(True, Path(__file__).name), (False, "comm_of_mine.py")])
def test_a_communication_wrapper_stands_for_the_line_that_calls_it(tmp_path, monkeypatch, is_declared, named):
    (tmp_path / "comm_of_mine.py").write_text(
        "import threading\n"
        "from pdlcheck.worlds.stack_position import place_of\n"
        "def where(): return place_of(threading.get_ident())\n"
        "def through_another(): return [place for place in map(lambda _: where(), [1])][0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    declare_wrappers(["comm_of_mine"] if is_declared else [])
    try:
        wrapper = importlib.import_module("comm_of_mine")
        place, here = wrapper.through_another(), line()
    finally:
        declare_wrappers([])
        sys.modules.pop("comm_of_mine")
    assert named in place.words
    assert place.words.endswith(here) == is_declared


def test_a_wrapper_that_nobody_calls_is_named_itself(tmp_path, monkeypatch):
    (tmp_path / "comm_alone.py").write_text(
        "import threading\nfrom pdlcheck.worlds.stack_position import place_of\nplaces = []\n"
        "def where(): places.append(place_of(threading.get_ident()))\n"
        "def note(): where()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    declare_wrappers(["comm_alone"])
    try:
        wrapper = importlib.import_module("comm_alone")
        thread = threading.Thread(target=wrapper.note)
        thread.start()
        thread.join()
    finally:
        declare_wrappers([])
        sys.modules.pop("comm_alone")
    assert wrapper.places[0].words.endswith("comm_alone.py:4")
