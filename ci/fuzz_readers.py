"""Read slightly damaged files and messages in every format: no reader may crash, hang or use much memory.

Usage: python ci/fuzz_readers.py [--seconds 60] [--seed 0] [--only TARGET,TARGET] [--replay FILE --only TARGET]

Hypothesis edits the examples in ci/fuzzing/corpus: edge files in each format, compressed files, checkpoints, and
messages between processes. An edge file must become a graph that can be ranked, or an error that names it. A checkpoint
must be loaded, or refused with all objects unchanged. A stranger that connects to a launch must be refused.
An input that breaks a reader is reduced and written to the corpus; later runs try it first. Exit code 1 if
a reader broke.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fuzzing.limits import LIMIT_S
from fuzzing.target import CORPUS, NAMES
from rich.console import Console
from rich.table import Table

from pdlcheck.cores import usable_cores

_START_S = 120.0  # start of a child on a busy machine
_HANGS_S = 6 * LIMIT_S  # inside C code, where the child's alarm has no effect


@dataclass(frozen=True)
class Found:
    """The number of executions of a reader, and its failure; ``words`` is empty if it did not fail."""

    target: str
    executions: int
    seconds: float
    words: str = ""
    file: Path | None = None


def main() -> int:
    """Fuzz the readers; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="in all, of each core; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--only", default=",".join(NAMES), metavar="TARGET,TARGET", help="default: %(default)s")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="read this file alone, with the one target")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where what is found goes; default: %(default)s")
    parser.add_argument("--plugin", action="append", default=[], metavar="MODULE", help="imported before; for tests")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"--only {unknown[0]!r} is no target, choose from {', '.join(NAMES)}")
    if options.replay is not None:
        if len(names) != 1:
            parser.error("--replay needs one target, as in --only npz")
        return _replay(names[0], options.replay.absolute(), options.plugin)
    jobs = min(usable_cores(), len(names))
    seconds = options.seconds * jobs / len(names)
    with ThreadPoolExecutor(jobs) as pool:
        parts = [pool.submit(_fuzz, names[job::jobs], seconds, options) for job in range(jobs)]
        found = [one for part in parts for one in part.result()]
    print(_table(sorted(found, key=lambda one: NAMES.index(one.target))))
    broken = [one for one in found if one.words]
    for one in broken:
        print(f"\n{one.target}: {one.words.rstrip()}")
        print(f"    replay: python ci/fuzz_readers.py --only {one.target} --replay {one.file}")
    return 1 if broken else 0


def _fuzz(names: Sequence[str], seconds: float, options: argparse.Namespace) -> list[Found]:
    """Fuzz the targets one after the other; replace a process that a reader has ended."""
    found: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="pdlcheck-fuzz-") as name:
        folder = Path(name)
        while left := names[len(found) :]:
            found += _child(left, folder, seconds, options)
    return found


def _child(names: Sequence[str], folder: Path, seconds: float, options: argparse.Namespace) -> list[Found]:
    """Return the results of the targets that one process reached; the last target may have ended it."""
    process = _start(folder, [str(folder), str(seconds), str(options.seed), ",".join(names), *options.plugin])
    hangs = threading.Event()
    watching = threading.Thread(target=_watch, args=(process, folder, hangs), daemon=True)
    watching.start()
    found: list[Found] = []
    assert process.stdout is not None
    began = time.monotonic()
    for line in process.stdout:
        if not line.startswith('{"target"'):
            continue
        said = json.loads(line)
        file = _kept(folder, said["target"], options.corpus) if said["found"] else None
        found.append(Found(said["target"], said["executions"], time.monotonic() - began, said["found"], file))
        began = time.monotonic()
        print(f"{said['target']}: {said['executions']} executions", flush=True)
    ended = process.wait()
    watching.join()
    if len(found) < len(names):
        name = names[len(found)]
        file = _kept(folder, name, options.corpus)
        how = f"hung for {_HANGS_S} s" if hangs.is_set() else f"was ended by {_signal(ended)}"
        words = f"the process that read it {how}\n{_errors(folder)[-2000:]}"
        if file is None:  # the process never began to read
            raise SystemExit(f"the fuzzer itself failed at {name}: {words}")
        found.append(Found(name, 0, time.monotonic() - began, words, file))
    process.stdout.close()
    return found


def _start(folder: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    ci = Path(__file__).resolve().parent
    path = os.pathsep.join(filter(None, [str(ci), str(ci.parent), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", "fuzzing.child", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr").open("w"),  # no thread reads this stream, so a pipe would fill up
        text=True,
    )


def _errors(folder: Path) -> str:
    return (folder / "stderr").read_text(errors="replace")


def _watch(process: subprocess.Popen[str], folder: Path, hangs: threading.Event) -> None:
    """End a child that reads one file for too long."""
    while process.poll() is None:
        time.sleep(0.2)
        written = [file.stat().st_mtime for file in folder.glob("*/file*")]
        if written and time.time() - max(written) > _HANGS_S:
            hangs.set()
            process.kill()
            return


def _kept(folder: Path, target: str, corpus: Path) -> Path | None:
    """Copy the file that was read last into the corpus."""
    found = next((folder / target).glob("file*"), None)
    if found is None:
        return None
    data = found.read_bytes()
    found.unlink()
    kept = corpus / target / f"found-{hashlib.sha256(data).hexdigest()[:8]}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(data)
    return kept


def _signal(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"


def _replay(name: str, file: Path, plugins: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="pdlcheck-fuzz-") as path:
        folder = Path(path)
        process = _start(folder, [path, "0", "0", f"{name}={file}", *plugins])
        out, _ = process.communicate(timeout=_START_S)
        print(out + _errors(folder), end="")
    return 1 if process.returncode else 0


def _table(found: Sequence[Found]) -> str:
    table = Table(title="Readers of almost right bytes")
    table.add_column("reader")
    for column in ("executions", "a second", "found"):
        table.add_column(column, justify="right")
    for one in found:
        rate = f"{one.executions / one.seconds:.0f}" if one.executions else ""
        table.add_row(one.target, str(one.executions), rate, "1" if one.words else "")
    table.add_section()
    table.add_row("all", str(sum(one.executions for one in found)), "", str(sum(bool(one.words) for one in found)))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


if __name__ == "__main__":
    sys.exit(main())
