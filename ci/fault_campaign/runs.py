"""Real pytest runs: a folder, a test file, a process, a deadline."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import shlex
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from fault_campaign.draw import LAUNCHERS
from fault_campaign.faults import Fault
from fault_campaign.launchers import launched
from fault_campaign.leftovers import SHARED_MEMORY, Before
from fault_campaign.own_memory import can_enter, enter
from fault_campaign.source import test_file
from fault_campaign.verdict import Run

__all__ = ["ROOT", "run_faults"]

ROOT = Path(__file__).resolve().parents[2]
_START_S = 60.0
_FAULT_S = 10.0
_OURS = ("test_faults.py", "pytest.ini", "__pycache__")


def run_faults(
    faults: Sequence[Fault], *, world: str = "gloo", plugins: Sequence[str] = (), keep: Path | None = None
) -> Run:
    """Run one test file with these faults, which share ``watch``, and record everything that remains.

    Args:
        faults: the faults to inject, one test each.
        world: one of ``WORLDS``.
        plugins: pytest plugins besides the recorder.
        keep: a folder that gets a copy of the test file.
    """
    with tempfile.TemporaryDirectory(prefix="pdlcheck-faults-") as name:
        folder = Path(name)
        for part in ("moments", "temporary", "base", "here", "shm"):
            (folder / part).mkdir()
        source = test_file(faults, folder / "moments")
        (folder / "here" / "test_faults.py").write_text(source)
        (folder / "here" / "pytest.ini").write_text("[pytest]\n")
        if keep is not None:
            (keep / "test_faults.py").write_text(source)
        return _run(folder, faults, world, plugins)


def _run(folder: Path, faults: Sequence[Fault], world: str, plugins: Sequence[str]) -> Run:
    token = f"PDLCHECK_FAULTS_RUN={uuid.uuid4().hex}"
    shared = folder / "shm" if can_enter() else SHARED_MEMORY
    before = Before.look(token, folder / "temporary", shared)
    record = folder / "record"
    command = [*launched(world, max(fault.world_size for fault in faults)), "-m", "pytest", "-q"]
    command += ["--world", "gloo" if world in LAUNCHERS else world, "-p", "no:cacheprovider"]
    command += ["--pdl-launch", "join"] if world in LAUNCHERS else []
    command += ["-p", "no:benchmark", "-p", "no:randomly"]
    command += ["-p", "fault_campaign.recorder", *(word for plugin in plugins for word in ("-p", plugin))]
    command += [f"--faults-record={record}", f"--faults-moments={folder / 'moments'}", f"--basetemp={folder / 'base'}"]
    command += [f"--faults-watch={int(faults[0].watch)}", "test_faults.py"]
    path = [str(ROOT), str(ROOT / "ci"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    environment |= dict([token.split("=")], TMPDIR=str(folder / "temporary"))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # without this cache pytest rewrites every plugin in every rank
    with (folder / "output").open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=folder / "here",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(_prepare, shared),
        )
        struck = _strike(process, faults[0]) if faults[0].where == "run" else 0.0
        exitcode = _wait(process, _START_S + _FAULT_S * len(faults))
        ended_s = time.monotonic() - struck if struck else 0.0
    left = before.left()
    for pid in before.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    left += [f"file {path.name}" for path in (folder / "here").iterdir() if path.name not in _OURS]
    said = (folder / "output").read_text(errors="replace")
    lines = record.read_text().splitlines() if record.exists() else []
    notes = {path.name: path.read_text() for path in (folder / "moments").iterdir()}
    moments = {int(name): float(text or 0) for name, text in notes.items() if name.isdigit()}
    output = f"$ {shlex.join(command)}\n{said}"
    return Run([json.loads(line) for line in lines], moments, frozenset(notes), exitcode, output, left, ended_s)


def _strike(process: subprocess.Popen[bytes], fault: Fault) -> float:
    """Send a signal to the process group of pytest, as a terminal does after Ctrl-C."""
    time.sleep(fault.delay_s)
    struck = time.monotonic()
    for pause_s in (0.0, 0.1) if fault.action else (0.0,):
        time.sleep(pause_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, getattr(signal, fault.signo))
    return struck


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def _prepare(shared: Path) -> None:
    if shared != SHARED_MEMORY:
        enter(shared)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores SIGINT
    # else a rank that crashes may write a core file
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
