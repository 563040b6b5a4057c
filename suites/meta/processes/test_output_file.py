"""Endless output of a rank takes little memory, and its beginning and end are shown."""

from __future__ import annotations

import os
import sys

import pytest

from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller import output_file
from pdlcheck.worlds.processes.controller.output_file import OutputFile

MANY = 200_000
LINES = [f"line {number}: héllo\n" for number in range(MANY)]


@pytest.fixture
def file():
    made = OutputFile()
    yield made
    os.close(made.fd)


def room(file: OutputFile) -> int:
    """Return the bytes of memory that the file takes."""
    return os.fstat(file.fd).st_blocks * 512


def test_what_is_not_much_is_read_as_it_is(file):
    os.write(file.fd, "héllo ".encode() + b"\xc3")
    assert file.take() == "héllo "
    os.write(file.fd, b"\xa9\xff\n")  # the rest of a letter, and an invalid byte
    assert file.take() == "é\ufffd\n"
    assert file.take() == ""


def test_of_much_both_ends_are_kept_and_the_rest_is_counted(file):
    written = 0
    for line in LINES * 4:
        written += os.write(file.fd, line.encode())
        if written % 1000 == 0:
            file.bound()
    text = file.take()
    assert text.startswith(LINES[0] + LINES[1])
    assert text.endswith(LINES[-2] + LINES[-1])
    head, _, rest = text.partition("\n... ")
    count, _, tail = rest.partition(" bytes of output are left out ...\n")
    assert int(count) + len(head.encode()) + len(tail.encode()) == pytest.approx(written, abs=8)  # cut inside a letter
    assert len(text) <= 3 * output_file._END + 100
    os.write(file.fd, b"the next")
    assert file.take() == "the next"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux frees the middle of a file")
def test_while_nobody_reads_it_takes_little_room(file):
    piece = b"x" * 999 + b"\n"
    for _ in range(100):
        os.write(file.fd, piece * 1000)
        file.bound()
        assert room(file) < output_file._MOST + (2 << 20)
    assert " bytes of output are left out ..." in file.take()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux frees the middle of a file")
def test_what_was_read_takes_no_room_while_the_rank_goes_on_writing(file):
    for _ in range(20):
        os.write(file.fd, b"x" * 999_999 + b"\n")
        assert len(file.take()) == 1_000_000
        assert room(file) < (3 << 20)


def test_of_a_journal_nothing_is_left_out():
    journal = OutputFile(is_whole=True)
    try:
        os.write(journal.fd, b"{}\n" * 4_000_000)
        journal.bound()
        assert len(journal.take()) == 12_000_000
    finally:
        os.close(journal.fd)


def test_an_idle_rank_begins_a_new_file(file):
    os.write(file.fd, b"x" * (3 << 20))
    file.take()
    file.rewind()
    assert os.fstat(file.fd).st_size == 0
    os.write(file.fd, b"the next")
    assert file.take() == "the next"


def test_of_a_rank_that_writes_much_both_ends_are_shown(capsys):
    world = ProcessWorld(timeout_s=60)
    try:
        world.run(lambda: os.write(1, b"the beginning\n" + b"x\n" * 10_000_000 + b"the end\n"), world_size=1)
        told = capsys.readouterr().out
    finally:
        world.close()
    assert told.startswith("[rank 0] the beginning\n[rank 0] x\n")
    assert told.endswith("[rank 0] the end\n")
    assert " bytes of output are left out ...\n" in told
