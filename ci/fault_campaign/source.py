"""The test file that commits the faults: one test for each fault, followed by a test that must pass."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import getsource
from pathlib import Path

from pdlcheck.suites.meta.processes.hoarding import hoard, limit_memory

from fault_campaign.faults import PATIENT_S, Fault
from fault_campaign.leftovers import LIVES_ON

__all__ = ["test_file"]

_HEAD = '''\
"""Written by ci/inject_faults.py."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import Semaphore
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

kept = []
MOMENTS = Path({moments!r})


def now(number):
    """Note when the fault happened."""
    (MOMENTS / str(number)).write_text(repr(time.monotonic()))


def rounds(number):
    for _ in range(number):
        dist.all_reduce(torch.ones(8))


def meet():
    dist.all_reduce(torch.ones(8))


class Odd(Exception):
    """Cannot be made from its args, as pickle would do."""

    def __init__(self, one, two):
        super().__init__(f"{{one}} and {{two}}")


class Silent(Exception):
    def __str__(self):
        raise SystemExit(5)


class Unsendable(Exception):
    def __reduce__(self):
        raise SystemExit(6)


class Slotted(Exception):
    __slots__ = ("code",)


class RefusesNotes(Exception):
    def add_note(self, note):
        raise KeyboardInterrupt


class Long(Exception):
    def __init__(self, words):
        super().__init__(words + "x" * 5_000_000 + "the end of it")


class Unreadable:
    """A result that raises ``error`` where it is unpickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return fails, (self.error,)


def fails(error):
    raise error("while it is read")


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {{}}))


def gone():
    """A folder that is no longer there."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    return "."


def orphan(session):
    """A process that lives on, with a port, for as long as its rank does."""
    code = "import socket, time; one = socket.create_server(('127.0.0.1', 0)); time.sleep(600)"
    environment = {{**os.environ, {LIVES_ON!r}: "1"}}
    subprocess.Popen([sys.executable, "-c", code], start_new_session=session, env=environment)


def spoil(data):
    """Write to the pipe of this process's controller, as one does who mistakes the number of a descriptor."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
            if end.family == socket.AF_UNIX:
                os.write(int(name), data)
'''

_HEALTHY = """

{strike}@pytest.mark.world_size({size})
def {name}_{which}(rank, world_size):
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == world_size * (world_size + 1) / 2
    (MOMENTS / f"{which}-{number}-{{rank}}").touch()
"""


def test_file(faults: Sequence[Fault], moments: Path) -> str:
    """Return the source of a test file for these faults; each writes its moment into a file in ``moments``."""
    head = _HEAD.format(moments=str(moments), LIVES_ON=LIVES_ON)
    text = "\n\n".join([head, getsource(limit_memory), getsource(hoard)])
    for fault in faults:
        text += f"\n\n# {fault}"
        if fault.where == "run":
            text += _healthy_run(fault)
            continue
        if fault.where == "idle" or fault.limit_s < PATIENT_S:  # on ranks that exist already
            text += _healthy(fault, "before")
        if fault.where != "idle":
            text += _on_ranks(fault)
        text += _healthy(fault, "next", _strike(fault, "between_tests") if fault.where == "idle" else "")
    return text


def _on_ranks(fault: Fault) -> str:
    commit = [f"if dist.get_rank() == {fault.rank}:", *_indent(_commit(fault))]
    strike = _strike(fault, "in_call") if fault.signo else ""
    if fault.limit_s < PATIENT_S:
        strike += f"@pytest.mark.limit({fault.limit_s})\n"
    marker = f"{strike}@pytest.mark.world_size({fault.world_size})"
    if fault.where == "setup":
        fixture = ["@pytest.fixture", f"def broken_{fault.number}(rank):", *_indent([*commit, "yield"])]
        test = [marker, f"def {fault.name}(broken_{fault.number}):", *_indent(["meet()"])]
        return _lines(fixture, test)
    if fault.where == "teardown":
        fixture = ["@pytest.fixture", f"def broken_{fault.number}(rank):", *_indent(["yield", *commit])]
        test = [marker, f"def {fault.name}(broken_{fault.number}):", *_indent(["meet()"])]
        return _lines(fixture, test)
    body = _body(fault, commit)
    if fault.where == "controller":
        run = f"world.run(body_{fault.number}, world_size={fault.world_size})"
        return _lines(
            [f"def body_{fault.number}():", *_indent(body)],
            [*strike.splitlines(), f"def {fault.name}(world):", *_indent([run])],
        )
    return _lines([marker, f"def {fault.name}():", *_indent(body)])


def _body(fault: Fault, commit: Sequence[str]) -> list[str]:
    if fault.signo:  # the signal arrives while the ranks communicate
        return ["while True:", *_indent(["meet()", "time.sleep(0.001)"])]
    rounds = [f"rounds({fault.rounds})"]
    match fault.moment:
        case "before":
            return [*commit, "meet()"]
        case "inside":
            return [*rounds, *commit, "meet()"]
        case "after":
            return [*rounds, "meet()", *commit]
    # the fault is this rank's argument of the collective that all ranks join
    return [*rounds, *commit, "else:", *_indent(list(fault.extra))]


def _commit(fault: Fault) -> list[str]:
    pause = [f"time.sleep({fault.delay_s})"] if fault.delay_s else []
    return [*pause, f"now({fault.number})", *fault.action]


def _strike(fault: Fault, when: str) -> str:
    whom = f"kind={fault.kind!r}, rank={fault.rank}, size={fault.world_size}"
    return f"@pytest.mark.strike({fault.number}, {when!r}, {whom}, signo={fault.signo!r}, after_s={fault.delay_s})\n"


def _healthy(fault: Fault, which: str, strike: str = "") -> str:
    return _HEALTHY.format(size=fault.world_size, name=fault.name, which=which, number=fault.number, strike=strike)


def _healthy_run(fault: Fault) -> str:
    """Return several seconds of tests on ranks, so that a Ctrl-C can arrive at any moment of them."""
    return _lines(
        [
            '@pytest.mark.parametrize("number", range(200))',
            f"@pytest.mark.world_size({fault.world_size})",
            f"def {fault.name}(number):",
            *_indent([f"rounds({fault.rounds})", f"time.sleep({0.05 + fault.delay_s / 50:.3f})", "meet()"]),
        ]
    )


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _lines(*blocks: Sequence[str]) -> str:
    return "\n" + "\n\n\n".join("\n".join(block) for block in blocks) + "\n"
