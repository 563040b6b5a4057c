"""Strangers to a launch: other users and hosts; some have read the store, some send nothing, some relay messages."""

from __future__ import annotations

import json
import os
import pickle
import socket
import stat
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge
from pathlib import Path

import pytest

from pdlcheck.errors import WorldUnavailable
from pdlcheck.launch.environment import Launch
from pdlcheck.worlds.agents import door as door_module
from pdlcheck.worlds.agents.door import Door, enter
from pdlcheck.worlds.launched import meeting
from pdlcheck.worlds.launched.meeting import Listener, reach
from pdlcheck.worlds.launched.meeting_file import MeetingFile

KEY = b"the key of a launch"


@pytest.fixture
def door():
    made = Door("127.0.0.1", KEY, world_size=2)
    yield made
    made.close()


def nobody_comes(door: Door, seconds: float = 0.5) -> None:
    with pytest.raises(TimeoutError):
        door.accept(time.monotonic() + seconds)


def nobody_comes_until(door: Door, done) -> None:
    until = time.monotonic() + 20
    while not done() and time.monotonic() < until:
        nobody_comes(door, 0.05)
    assert done()


def in_background(action):
    """Run ``action`` beside the test; append its result or its error to the list."""
    results = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


# -- the door ---------------------------------------------------------------------------------------


def test_who_knows_the_key_comes_in(door):
    thread, entered = in_background(lambda: enter("127.0.0.1", door.port, KEY))
    inside = door.accept(time.monotonic() + 20)
    thread.join()
    entered[0].send("hello")
    assert inside.recv() == "hello"
    assert not door.refused


@pytest.mark.parametrize("said", [b"\x00\x00\x00\x05hello", b"GET / HTTP/1.1\r\n\r\n", b"\x7f\xff\xff\xff", b""])
def test_a_stranger_does_not_get_in(door, said):
    with socket.create_connection(("127.0.0.1", door.port)) as stranger:
        stranger.sendall(said)
        nobody_comes(door)


def test_nothing_is_unpickled_for_who_has_another_key(door, tmp_path):
    """The key of a launch differs from the text that its meeting place gives to every process."""

    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    def attack():
        connection = Connection(socket.create_connection(("127.0.0.1", door.port)).detach())
        connection.send_bytes(pickle.dumps(Runs()))
        answer_challenge(connection, b"another key")

    thread, errors = in_background(attack)
    nobody_comes_until(door, lambda: list(door.refused) == ["127.0.0.1"])
    thread.join()
    assert isinstance(errors[0], (AuthenticationError, EOFError, OSError))
    assert not (tmp_path / "owned").exists()


def test_who_passes_on_what_two_ends_say_does_not_come_between_them(door):
    """A stranger changes the store so that ranks connect to it, and relays the door's challenge to them."""
    with socket.create_server(("127.0.0.1", 0)) as between:
        in_background(lambda: enter("127.0.0.1", between.getsockname()[1], KEY))
        rank, _ = between.accept()
        with rank, socket.create_connection(("127.0.0.1", door.port)) as to_door:

            def pass_on():
                for start, end in ((to_door, rank), (rank, to_door), (to_door, rank)):
                    end.sendall(start.recv(4096))

            in_background(pass_on)
            nobody_comes_until(door, lambda: list(door.refused) == ["127.0.0.1"])


def test_a_rank_does_not_stay_with_a_door_that_has_another_key(door):
    thread, entered = in_background(lambda: enter("127.0.0.1", door.port, b"another key"))
    nobody_comes_until(door, lambda: not thread.is_alive())
    assert isinstance(entered[0], AuthenticationError)

    with socket.create_server(("127.0.0.1", 0)) as stranger:
        thread, entered = in_background(lambda: enter("127.0.0.1", stranger.getsockname()[1], KEY))
        taken, _ = stranger.accept()
        with Connection(taken.detach()) as connection:  # admits every process, and cannot prove that it has the key
            connection.send_bytes(b"#CHALLENGE#" + b"x" * 20)
            connection.recv_bytes()
            connection.send_bytes(b"#WELCOME#")
            connection.recv_bytes()
            connection.send_bytes(b"x" * 16)
            thread.join()
    assert isinstance(entered[0], AuthenticationError)


def test_nobody_waits_for_strangers_who_say_nothing(door):
    silent = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(8)]  # as many as the door's backlog
    thread, entered = in_background(lambda: enter("127.0.0.1", door.port, KEY))
    inside = door.accept(time.monotonic() + door_module.HELLO_S / 2)
    thread.join()
    entered[0].send("hello")
    assert inside.recv() == "hello"
    for one in silent:
        one.close()


def test_of_many_strangers_those_who_have_been_silent_for_longest_are_sent_away(door, monkeypatch):
    monkeypatch.setattr(door_module, "_AT_THE_DOOR", 2)
    silent = []
    for _ in range(3):
        silent.append(socket.create_connection(("127.0.0.1", door.port)))
        own = silent[-1].getsockname()
        nobody_comes_until(door, lambda own=own: own in [one.getpeername() for one in door._outside])
    silent[0].settimeout(20)
    while silent[0].recv(100):  # first the challenge, and then the end
        pass
    silent[2].settimeout(0.2)

    def read_to_the_end():
        while silent[2].recv(100):
            pass

    with pytest.raises(TimeoutError):
        read_to_the_end()
    for one in silent:
        one.close()


# -- the file ---------------------------------------------------------------------------------------


def test_the_file_is_for_this_user_alone_and_goes_away(tmp_path):
    path = tmp_path / "meeting"
    old_mask = os.umask(0)
    try:
        file = MeetingFile(path, "here")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert MeetingFile.read(path) == "here"
    file.remove()
    file.remove()
    assert not path.exists()


def test_what_an_ended_launch_has_left_is_overwritten(tmp_path):
    path = tmp_path / "meeting"
    path.touch(0o600)
    path.write_text("an old and longer text")
    file = MeetingFile(path, "here")
    assert MeetingFile.read(path) == "here"
    file.remove()


def test_two_launches_do_not_meet_in_one_file(tmp_path):
    path = tmp_path / "meeting"
    first = MeetingFile(path, "the first")
    with pytest.raises(FileExistsError, match=f"another launch meet at {path}: wait for its end, or pass"):
        MeetingFile(path, "the second")
    assert MeetingFile.read(path) == "the first"
    first.remove()
    MeetingFile(path, "the second").remove()


def a_link(path: Path) -> None:
    path.with_name("precious").write_text("precious")
    path.symlink_to(path.with_name("precious"))


def open_to_all(path: Path) -> None:
    path.touch()
    path.chmod(0o644)


def anothers(path: Path) -> None:
    path.touch(0o600)
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (a_link, "Too many levels of symbolic links"),
        (os.mkfifo, "is no plain file: pass --pdl-init-method file:///PATH"),
        (Path.mkdir, "meeting"),
        (open_to_all, r"others may read or write .* \(its mode is 0644\): pass"),
        pytest.param(
            anothers,
            "belongs to user 65534, this process to user 0: pass",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user"),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_file_that_others_could_have_laid_there_is_neither_written_nor_believed(tmp_path, make, words):
    path = tmp_path / "meeting"
    make(path)
    with pytest.raises(OSError, match=words):
        MeetingFile(path, "here")
    if make is not Path.mkdir:
        with pytest.raises(OSError, match=words):
            MeetingFile.read(path)
    assert not (tmp_path / "precious").exists() or (tmp_path / "precious").read_text() == "precious"


# -- ranks that look for rank 0 ---------------------------------------------------------------------


def of_two(rank: int, init_method: str, key: bytes = b"") -> Launch:
    return Launch("torchrun", rank, 2, 0, 1, init_method, key)


def test_a_rank_does_not_come_to_a_place_that_others_could_have_laid_out(tmp_path):
    path = tmp_path / "meeting"
    path.write_text(json.dumps({"host": "127.0.0.1", "port": 1, "key": "00"}))
    path.chmod(0o666)
    with pytest.raises(WorldUnavailable, match=r"rank 1 does not look for rank 0 at file://.*its mode is 0666"):
        next(reach(of_two(1, f"file://{path}")))
    with pytest.raises(WorldUnavailable, match=r"rank 0 cannot wait for the others at file://.*its mode is 0666"):
        Listener(of_two(0, f"file://{path}"))


def test_a_rank_that_looks_for_the_file_in_another_place_is_told_where_rank_0_must_be(monkeypatch, tmp_path):
    monkeypatch.setattr(meeting, "MEETING_S", 0.1)
    with pytest.raises(WorldUnavailable, match=r"rank 0 writes this file: .* the same user, with the same TMPDIR"):
        next(reach(of_two(1, f"file://{tmp_path}/meeting")))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_store_of_several_nodes_does_not_tell_the_key_and_a_wrong_one_is_told_at_both_ends(monkeypatch):
    monkeypatch.setattr(meeting, "MEETING_S", 3.0)
    where = f"tcp://127.0.0.1:{free_port()}"
    _, found = in_background(lambda: next(reach(of_two(1, where, b"the key on node 1"))))
    listener = Listener(of_two(0, where, b"the key on node 0"))  # torch's store admits both, whatever their keys
    try:
        with pytest.raises(TimeoutError):
            listener.accept(time.monotonic() + 5)
        assert isinstance(found[0], WorldUnavailable)
        assert "has another key, is PDLCHECK_LAUNCH_KEY the same on every node?" in str(found[0])
        assert "processes at 127.0.0.1 came with another key, is PDLCHECK_LAUNCH_KEY the same" in listener.strangers()
        place = json.loads(listener._store.get("pdlcheck/rank0"))
        assert place == {"host": "127.0.0.1", "port": listener.port}, "it tells more than where"
    finally:
        listener.close()
