"""Another user of the machine tries to enter a launch: by its file, its store, its ports."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from .test_launched import TORCHRUN, free_port, outside

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")

TESTS = """
import subprocess, sys, time, pytest
from pdlcheck.item_runners.launched import session as launched

@pytest.mark.world_size(1)
def test_before(rank): pass

def test_meanwhile(request):
    '''All are here, and rank 0 listens for the ranks that the next test needs.'''
    made = launched.placement(request.config)
    place = [str(made.host), str(made._listener.port)]
    with open("attack.log", "w") as log:
        attack = subprocess.Popen([sys.executable, "-B", "attack.py", *place], stdout=log, stderr=log)
        while attack.poll() is None:
            with pytest.raises(TimeoutError):
                made._listener.accept(time.monotonic() + 0.2)

@pytest.mark.world_size(2)
def test_after(rank): pass
"""
ATTACK = """
import encodings.idna, glob, hashlib, hmac, os, pickle, socket, sys  # what it needs, while it can read Python's files
from datetime import timedelta
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from torch.distributed import TCPStore

host, port, temporary = sys.argv[1], int(sys.argv[2]), os.environ["TEMPORARY"]
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)  # its capabilities have gone, too


class Run:
    def __reduce__(self):
        return os.system, (f"id > {temporary}/owned_$(id -u)",)


def tries(what, action):
    try:
        print(f"{what}: {action()!r}", flush=True)
    except Exception as error:
        print(f"{what}: {type(error).__name__}", flush=True)


def come_in(key):
    connection = Connection(socket.create_connection((host, port)).detach())
    connection.send_bytes(pickle.dumps(Run()))
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(pickle.dumps(Run()))
    return "came in"


store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
store.set_timeout(timedelta(seconds=1))
tries("the store tells", lambda: store.get("pdlcheck/rank0"))
files = sorted(name for name in glob.glob(f"{temporary}/**", recursive=True) if "pdlcheck" in name)
for file in files:
    tries(f"open {file}", lambda: open(file).read())
for key in (b"", b"0", b"key"):
    tries("come in", lambda: come_in(key))
"""


@pytest.fixture
def open_folder():
    """Yield a folder that every user may enter and write, such as /tmp."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o1777)
        yield Path(name)


@pytest.mark.slow
def test_another_user_of_the_machine_does_not_get_in(open_folder):
    (open_folder / "test_launched_ranks.py").write_text(TESTS)
    (open_folder / "attack.py").write_text(ATTACK)
    command = [*TORCHRUN[:-1], "2", "--master-port", str(free_port())]
    done = subprocess.run(
        [*command, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "test_launched_ranks.py"],
        cwd=open_folder,
        env=outside() | {"TMPDIR": str(open_folder), "TEMPORARY": str(open_folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    tried = (open_folder / "attack.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + tried
    assert tried.count("come in: AuthenticationError") == 3, tried
    assert "the store tells: Dist" in tried, tried
    assert "owned_" not in " ".join(os.listdir(open_folder))
