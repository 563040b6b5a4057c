"""Run examples/elastic.py as one worker of torchrun, and kill the worker at the planned event.

Usage: torchrun ... ci/training_faults/killed.py PLAN LOG EXAMPLE [arguments of the example]

PLAN holds one kill for each start of the workers. The worker writes the event to LOG and then sends the signal to
itself, so no Python code runs between the logged event and the end.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from kills import Kill

_write, _fsync = os.write, os.fsync


def main() -> None:
    plan, log, example, *rest = sys.argv[1:]
    kills = json.loads(Path(plan).read_text())
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"attempt {attempt}\n", end="", flush=True)  # in one write: workers of torchrun are unbuffered
    if attempt < len(kills):
        kill = Kill(**kills[attempt])
        if kill.rank == int(os.environ["RANK"]):
            arm(kill, Striker(kill, attempt, log))
    sys.argv = [example, *rest]
    runpy.run_path(example, run_name="__main__")


class Striker:
    """A counter of events that kills this process at the drawn one."""

    def __init__(self, kill: Kill, attempt: int, log: str) -> None:
        self.kill, self.attempt, self.log, self.seen = kill, attempt, log, 0

    def reached(self) -> bool:
        self.seen += 1
        return self.seen == self.kill.count

    def strike(self) -> None:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        _write(descriptor, f"{self.attempt} {self.kill.number}\n".encode())
        _fsync(descriptor)
        os.kill(os.getpid(), signal.SIGKILL)

    def strike_if_reached(self) -> None:
        if self.reached():
            self.strike()


def arm(kill: Kill, striker: Striker) -> None:
    """Install the hook that delivers the kill."""
    if kill.kind == "moment":
        timer = threading.Timer(2 * kill.share, striker.strike)
        timer.daemon = True
        timer.start()
    elif kill.kind == "step":
        dist.all_reduce = _before(dist.all_reduce, striker)
    elif kill.kind == "waiting":
        dist.gather_object = _after(dist.gather_object, striker)
    elif kill.kind == "write":
        os.write = _torn(striker)
    elif kill.kind == "flush":
        os.fsync = _before(os.fsync, striker, _is_temporary)
    elif kill.kind == "rename":
        os.replace = _before(os.replace, striker)
    elif kill.kind == "renamed":
        os.replace = _after(os.replace, striker)
    else:
        event = {"load": "open", "remove": "os.remove"}[kill.kind]
        sys.addaudithook(
            lambda name, args: striker.strike_if_reached() if name == event and str(args[0]).endswith(".ckpt") else None
        )


def _before(function: Any, striker: Striker, where: Any = None) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if where is None or where(*args):
            striker.strike_if_reached()
        return function(*args, **kwargs)

    return wrapped


def _after(function: Any, striker: Striker) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        striker.strike_if_reached()
        return result

    return wrapped


def _torn(striker: Striker) -> Any:
    """Write only a part of a block before the kill; the tree and each larger tensor are blocks of their own."""

    def wrapped(descriptor: int, content: Any) -> int:
        if _is_temporary(descriptor) and len(content) > 1000 and striker.reached():
            _write(descriptor, content[: int(len(content) * striker.kill.share)])
            striker.strike()
        return _write(descriptor, content)

    return wrapped


def _is_temporary(descriptor: int) -> bool:
    return os.readlink(f"/proc/self/fd/{descriptor}").endswith(".tmp")


if __name__ == "__main__":
    main()
