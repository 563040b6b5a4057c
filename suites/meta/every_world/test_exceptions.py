"""The controller catches the exception that a rank raised, even if its class takes other arguments than its text."""

from __future__ import annotations

import sys
import threading

import pytest
import torch.distributed as dist

from pdlcheck.errors import RankFailed


class ConfigError(Exception):
    """An exception that takes more arguments than its text."""

    def __init__(self, key, value):
        super().__init__(f"bad {key}: {value}")
        self.key, self.value = key, value


class LimitError(ValueError):
    """An exception that takes keyword arguments only."""

    def __init__(self, *, limit):
        super().__init__(f"more than {limit}")
        self.limit, self.lock = limit, threading.Lock()  # cannot be pickled


class OddError(Exception):
    """An exception whose text comes from its attributes, not from its arguments."""

    def __init__(self, first, second):
        self.first, self.second = first, second

    def __str__(self):
        return f"{self.first} and {self.second}"


def raises(make):
    if dist.get_rank() == 1:
        raise make()
    dist.barrier()


def test_an_exception_with_fields_of_its_own(world):
    with pytest.raises(ConfigError, match="bad lr: 3") as raised:
        world.run(raises, lambda: ConfigError("lr", 3), world_size=2)
    assert (raised.value.key, raised.value.value) == ("lr", 3)
    assert any("rank 1 of 2 raised this" in note for note in raised.value.__notes__)
    with pytest.raises(ValueError, match="more than 7") as raised:
        world.run(raises, lambda: LimitError(limit=7), world_size=2)
    assert type(raised.value) is LimitError
    assert raised.value.limit == 7
    with pytest.raises(OddError, match="this and that"):
        world.run(raises, lambda: OddError("this", "that"), world_size=2)


class ReducedError(ValueError):
    """An exception that leaves its notes behind when it is pickled."""

    def __reduce__(self):
        return type(self), self.args


def raises_with_notes(kind):
    rank = dist.get_rank()
    error = kind("no data") if rank < 2 else IndexError("no element 9")
    error.add_note(f"in the shard of rank {rank}")
    error.add_note("in step 3")
    dist.barrier()
    raise error


@pytest.mark.parametrize("kind", [ValueError, ReducedError])
def test_the_notes_of_every_rank_are_in_the_report(world, kind):
    with pytest.raises((ValueError, IndexError)) as raised:
        world.run(raises_with_notes, kind, world_size=3)
    story = "\n".join(raised.value.__notes__)
    for rank in range(3):
        assert f"in the shard of rank {rank}" in story
    assert "noted: in step 3" not in story, "each error that is shown in full has this note"


def exits(code):
    dist.barrier()
    sys.exit(code)


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (None, "a rank that has done its work returns: catch SystemExit around a program that ends so"),
        (0, "a rank that has done its work returns: catch SystemExit around a program that ends so"),
        (3, "raise an ordinary exception to make the call fail"),
        ("ill", "raise an ordinary exception to make the call fail"),
    ],
)
def test_a_program_that_exits_ends_its_rank_alone(world, code, cure):
    with pytest.raises(RankFailed) as raised:
        world.run(exits, code, world_size=2)
    assert str(raised.value).partition(" ")[2].partition(" ")[2] == f"called sys.exit({code!r}); {cure}"
    assert "sys.exit(code)" in raised.value.traceback
    assert any("ranks 0, 1 of 2 raised this" in note for note in raised.value.__notes__)


def interrupts(kind):
    if dist.get_rank() == 1:
        raise kind("as if somebody had pressed Ctrl-C")
    dist.barrier()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
def test_what_would_end_the_session_is_the_failure_of_a_rank(world, kind):
    cure = "raise an ordinary exception to make the call fail"
    with pytest.raises(RankFailed, match=f"^rank 1 raised {kind.__name__}; {cure}") as raised:
        world.run(interrupts, kind, world_size=2)
    assert "raise kind(" in raised.value.traceback
    assert world.run(dist.get_rank, world_size=2) == [0, 1]
