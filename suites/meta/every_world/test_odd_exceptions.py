"""Exceptions of odd classes and with very long texts: users see the rank's own error, with its rank."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from pdlcheck.worlds import get_world
from pdlcheck.worlds.exceptions import LONGEST, add_note, shorten, text_of


class Silent(Exception):
    def __str__(self):
        raise SystemExit(5)

    __repr__ = __str__


class Interrupts(Exception):
    def __str__(self):
        raise KeyboardInterrupt


class Unsendable(ValueError):
    def __reduce__(self):
        raise SystemExit(6)


class Slotted(ValueError):
    __slots__ = ("code",)


class RefusesNotes(ValueError):
    def add_note(self, note):
        raise SystemExit(7)


class NoText(ValueError):
    def __str__(self):
        return 7


def with_notes(notes):
    error = ValueError("my data")
    error.__notes__ = notes
    return error


ODD = {
    "its text raises SystemExit": (lambda: Silent("w"), Silent, "<exception str() failed>"),
    "its text raises KeyboardInterrupt": (lambda: Interrupts("w"), Interrupts, "<exception str() failed>"),
    "its text is no text": (lambda: NoText("w"), NoText, "<exception str() failed>"),
    "it cannot be pickled": (lambda: Unsendable("my data"), Exception, "my data"),
    "it has slots": (lambda: Slotted("my data"), Slotted, "my data"),
    "it refuses notes": (lambda: RefusesNotes("my data"), RefusesNotes, "my data"),
    "its notes are a tuple": (lambda: with_notes(("a note",)), ValueError, "my data"),
    "its notes are a text": (lambda: with_notes("a note"), ValueError, "my data"),
    "its notes are a number": (lambda: with_notes(3), ValueError, "my data"),
    "its notes are none": (lambda: with_notes([]), ValueError, "my data"),
}


def raises_on_rank_1(name):
    if dist.get_rank() == 1:
        raise ODD[name][0]()
    dist.barrier()


@pytest.mark.parametrize("name", ODD)
def test_it_is_raised_and_its_rank_is_told(world, name):
    _, kind, text = ODD[name]
    try:
        world.run(raises_on_rank_1, name, world_size=2)
    except BaseException as error:
        assert isinstance(error, kind)  # noqa: PT017 - no code of pytest may handle an odd exception
        assert text in text_of(error)  # noqa: PT017 - as above
        story = "\n".join(error.__notes__)
        assert "rank 1 of 2 raised this" in story
        assert ("a note" in story) == ("a t" in name)
    else:
        pytest.fail("nothing was raised")
    assert world.run(dist.get_rank, world_size=2) == [0, 1]


def ends(pid, error):
    if os.getpid() != pid:
        raise error


class Result:
    """A result that raises when another process unpickles it."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return ends, (os.getpid(), self.error)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
def test_a_result_that_cannot_be_read_does_not_end_the_session(kind):
    world = get_world("gloo")
    try:
        with pytest.raises(TypeError, match=rf"result of rank \d cannot be read by the controller: {kind.__name__}: 4"):
            world.run(lambda: Result(kind(4)), world_size=2)
        assert world.run(dist.get_rank, world_size=2) == [0, 1]
    finally:
        world.close()


class Presses:
    """A result that sends a Ctrl-C while it is unpickled."""

    def __reduce__(self):
        return presses, (os.getpid(),)


def presses(pid):
    if os.getpid() != pid:
        os.kill(os.getpid(), signal.SIGINT)


def test_a_ctrl_c_while_a_result_is_read_is_no_trouble_of_the_result():
    world = get_world("gloo")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of xdist ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            world.run(Presses, world_size=2)
        assert world.run(dist.get_rank, world_size=2) == [0, 1]
    finally:
        signal.signal(signal.SIGINT, before)
        world.close()


# -- long texts ------------------------------------------------------------------------------------

MUCH = 3_000_000


def raises_much(how):
    if dist.get_rank() == 1:
        words = "the beginning " + "x" * MUCH + " the end"
        if how == "cause":
            raise ValueError("my data") from KeyError(words)
        if how == "note":
            raise with_notes([words])
        if how == "group":
            raise ExceptionGroup("my data", [ValueError(words)])
        raise AssertionError(words)
    dist.barrier()


@pytest.mark.parametrize("how", ["text", "cause", "note", "group"])
def test_of_a_long_text_both_ends_are_shown(world, how):
    with pytest.raises(Exception, match=r"my data|the beginning") as caught:
        world.run(raises_much, how, world_size=2)
    story = "\n".join([str(caught.value), *caught.value.__notes__])
    if caught.value.__cause__ is not None:
        story += str(caught.value.__cause__)
    elif isinstance(caught.value, ExceptionGroup):
        story += str(caught.value.exceptions[0])
    assert "the beginning xxx" in story
    assert "xxx the end" in story
    assert f" {MUCH + 22 - LONGEST} characters are left out " in story
    assert len(story) < MUCH


def test_a_text_that_is_not_long_stays():
    error = ValueError("x" * LONGEST, 3)
    shorten(error)
    assert error.args == ("x" * LONGEST, 3)
    error = ValueError("x" * (LONGEST + 1), 3)
    shorten(error)
    assert "... 1 characters are left out ..." in error.args[0]
    assert error.args[1] == 3


def test_a_chain_that_comes_back_to_its_beginning_has_an_end():
    one, other = ValueError("x" * (LONGEST + 1)), ValueError("y" * (LONGEST + 1))
    one.__cause__, other.__cause__ = other, one
    shorten(one)
    assert "left out" in str(one)
    assert "left out" in str(other)


def test_a_note_comes_after_those_that_are_there():
    error = with_notes(["a", "b"])
    add_note(error, "c")
    assert error.__notes__ == ["a", "b", "c"]
