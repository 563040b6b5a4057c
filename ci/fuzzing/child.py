"""The process that reads: if it crashes or hangs, its parent finds the last file that it read.

Usage: python -m fuzzing.child FOLDER SECONDS SEED TARGETS [PLUGIN ...]

It prints one line of JSON for each target: its name, the number of executions, and its failures.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from fuzzing.limits import bounded, guard_the_machine
from fuzzing.target import CORPUS, Target, corpus_of
from fuzzing.targets import TARGETS

_ROUND = 2000  # number of executions after which Hypothesis starts again
_DEEP = 6  # number of traceback frames that are shown


def main() -> None:
    folder, seconds, number, names, *plugins = sys.argv[1:]
    for plugin in plugins:
        importlib.import_module(plugin)
    warnings.simplefilter("error")
    guard_the_machine()
    os.chdir(folder)
    for name in names.split(","):
        name, _, file = name.partition("=")
        if file:
            _read(TARGETS[name], Path(file).read_bytes())
        else:
            print(json.dumps(_fuzz(TARGETS[name], float(seconds), int(number))), flush=True)


def _fuzz(target: Target, seconds: float, number: int) -> dict[str, Any]:
    """Let Hypothesis make files for this time, or until one breaks the reader; then reduce that file."""
    _warm_up(target)
    until = time.monotonic() + seconds
    executions = 0
    smallest: list[Any] = []
    kept = CORPUS / target.name
    for file in sorted(kept.iterdir()) if kept.is_dir() else []:
        executions += 1
        try:
            _read(target, file.read_bytes())
        except BaseException:
            return {"target": target.name, "executions": executions, "found": traceback.format_exc(limit=-_DEEP)}

    def attempt(data: bytes) -> None:
        nonlocal executions
        if time.monotonic() > until and not smallest:
            return
        executions += 1
        try:
            _read(target, data)
        except BaseException:
            smallest[:] = data, traceback.format_exc(limit=-_DEEP)
            raise

    while time.monotonic() < until:
        number += 1_000_003
        run = settings(
            max_examples=_ROUND,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )(seed(number)(given(target.data)(attempt)))
        try:
            run()
        except BaseException:
            if not smallest:
                raise
            data, said = smallest
            _path(target).write_bytes(data)
            return {"target": target.name, "executions": executions, "found": said}
    _path(target).unlink(missing_ok=True)
    return {"target": target.name, "executions": executions, "found": ""}


def _warm_up(target: Target) -> None:
    """Read the correct examples without limits, because the first read compiles the reader on a new machine."""
    kept = CORPUS / target.name
    path = Path(f"warm-up{target.suffix}")  # outside the folder that the parent searches after a hang
    for data in corpus_of(target.name) if kept.is_dir() else []:
        with contextlib.suppress(Exception):  # it is read again, within the limits
            path.write_bytes(data)
            target.check(path)
    path.unlink(missing_ok=True)


def _read(target: Target, data: bytes) -> None:
    path = _path(target)
    path.write_bytes(data)
    with bounded():
        target.check(path)


def _path(target: Target) -> Path:
    folder = Path(target.name).absolute()
    folder.mkdir(exist_ok=True)
    return folder / f"file{target.suffix}"


if __name__ == "__main__":
    main()
