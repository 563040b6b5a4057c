"""Fuzz targets of messages between processes: damaged memory or pipes are reported, and the controller goes on."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fuzzing.mutations import mutated
from fuzzing.target import Broken, Target, require
from pdlcheck.worlds.agents.door import Door, enter
from pdlcheck.worlds.journal import notes
from pdlcheck.worlds.launched.meeting_file import MeetingFile
from pdlcheck.worlds.processes.controller.message_pipe import MessagePipe, report_of
from pdlcheck.worlds.processes.exchange.board import Board, SpoiledBoard, shared_file
from pdlcheck.worlds.processes.exchange.messages import Ending, Pong, Ready, Stack, packed
from pdlcheck.worlds.simulated.schedules.spec import schedule_of

__all__ = ["TARGETS"]

_PIECE = 700  # number of bytes that arrive together
_CALL = 1
_ROW, _LOG = 8 << 16, 1 << 18  # sizes in bytes of the two parts of the board of one rank


def _check_messages(path: Path) -> None:
    """Check a pipe with foreign bytes in it: the same messages as Python's own reader gives, or the end of the pipe."""
    data = path.read_bytes()
    with _written(data) as there:
        expected = _as_python_reads(there)
    with _written(data, _PIECE) as in_pieces:
        pipe, got = MessagePipe(in_pieces), []
        with contextlib.suppress(EOFError):
            while True:
                select.select([in_pieces], [], [])
                if (message := pipe.receive()) is not None:
                    got.append(bytes(message))
                    report_of(message)
    require(got == expected[: len(got)], "a message is not what Python reads")
    require(len(got) >= _before(expected), f"{len(got)} messages were read of {len(expected)}")


def _before(messages: list[bytes]) -> int:
    """Return the number of valid messages before the first invalid one."""
    for number, message in enumerate(messages):
        try:
            report_of(message)
        except EOFError:
            return number
    return len(messages)


@contextlib.contextmanager
def _written(data: bytes, piece: int = 1 << 20) -> Iterator[Connection[Any, Any]]:
    ours, theirs = Pipe()

    def write() -> None:
        with contextlib.suppress(OSError), theirs:
            for begin in range(0, len(data), piece):
                os.write(theirs.fileno(), data[begin : begin + piece])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join()


def _as_python_reads(connection: Connection[Any, Any]) -> list[bytes]:
    found = []
    with contextlib.suppress(EOFError, OSError, MemoryError, OverflowError, ValueError):
        while True:
            found.append(connection.recv_bytes(1 << 20))
    return found


def _check_board(path: Path) -> None:
    """Check the log of a rank whose memory was overwritten: its entries, or an error that reports the damage."""
    data = path.read_bytes()
    fd = shared_file(1)
    board = Board(fd, 1)
    try:
        os.pwrite(fd, data[:_LOG], _ROW)
        with contextlib.suppress(SpoiledBoard):
            board.take(0, _CALL)
        board.states([0], int.from_bytes(data[:8], "little"))
    finally:
        board.close()
        os.close(fd)


def _check_journal(path: Path) -> None:
    text = path.read_bytes().decode(errors="replace")
    require(all(isinstance(kind, str) for kind, _ in notes(text)), "a note has no kind")


def _check_schedule(path: Path) -> None:
    text = path.read_bytes().decode("latin-1")
    try:
        schedule = schedule_of(text)
    except ValueError as error:
        require(type(error) is ValueError and repr(text) in str(error), f"the error does not show the text: {error}")
        return
    require(str(schedule_of(str(schedule))) == str(schedule), f"{schedule} is read as another schedule")


def _check_meeting_file(path: Path) -> None:
    path.chmod(0o600)
    with contextlib.suppress(PermissionError):
        require(isinstance(MeetingFile.read(path), str), "no text was read")


def _check_door(path: Path) -> None:
    """Check both sides of a launch's door: a stranger that sends these bytes, and a stranger that answers with them."""
    data = path.read_bytes()
    door = Door("127.0.0.1", b"0123456789abcdef", 2)
    try:
        with socket.create_connection((door.host, door.port)) as stranger:
            _say(stranger, data)
            try:
                door.accept(time.monotonic() + 0.02).close()
            except TimeoutError:
                pass
            else:
                raise Broken("a stranger was let in")
    finally:
        door.close()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        entering = pool.submit(enter, "127.0.0.1", server.getsockname()[1], b"0123456789abcdef")
        stranger, _ = server.accept()
        with stranger:
            _say(stranger, data)
            try:
                entering.result(timeout=5).close()
            except (AuthenticationError, EOFError, OSError):
                pass
            else:
                raise Broken("a stranger was trusted")


def _say(stranger: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # already refused and closed
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)


def _log(*entries: object) -> bytes:
    """Return a rank's log as the rank writes it."""
    fd = shared_file(1)
    board = Board(fd, 1)
    try:
        board.clear(0, _CALL)
        for entry in entries:
            board.log(0, entry)
        return os.pread(fd, 400, _ROW)
    finally:
        board.close()
        os.close(fd)


_MESSAGES = [
    b"".join(struct.pack("!i", len(said)) + said for said in map(packed, messages))
    for messages in ([Ready({})], [Ending(3), Pong()], [Stack(1, "at x.py:3", "  File ...\n")])
]
_MESSAGES.append(struct.pack("!iQ", -1, len(packed(Pong()))) + packed(Pong()))

TARGETS = [
    Target("messages", mutated(_MESSAGES), _check_messages),
    Target("board", mutated([_log(), _log((0, "all_reduce")), _log((0, ("send", 1)), (1, None))]), _check_board),
    Target("journal", mutated([b'["warned", "text"]\n', b'["held", [1, 2]]\n["x", null]\n']), _check_journal),
    Target("schedule", mutated([b"first", b"random:7", b"pct:7,3,250", b"replay:4r1-17r0"]), _check_schedule),
    Target("meeting-file", mutated([b"127.0.0.1 4711 00ff\n", "tür".encode()]), _check_meeting_file),
    Target("door", mutated([b"\0\0\0\x20#CHALLENGE#{sha256}0123456789", b"\0\0\0\x09#WELCOME#"]), _check_door),
]
