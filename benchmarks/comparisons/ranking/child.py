"""The process of one peer: ``python -m ranking.child NAME`` answers requests, one JSON object a line.

A request names a function below and its arguments; the reply is the function's result.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pdlcheck.checks.graphs import Edges
from ranking.drawn import draw
from ranking.judged import judge
from ranking.peer import Question, Setting
from ranking.registry import find

PEER = find(sys.argv[1])
HERE: dict[str, Any] = {}


def judge_cases(numbers: list[int], seed: int) -> dict[str, Any]:
    """Return the verdicts on some drawn cases, at the strictest setting and, for a peer, at its default."""
    found = []
    for number in numbers:
        case = draw(number, seed)
        strict = judge(PEER, case, PEER.strict)
        usual = None if PEER.module == "pdlcheck" else judge(PEER, case, None)
        found.append({"number": number, "strict": strict._asdict(), "usual": usual and usual._asdict()})
    return {"verdicts": found}


def load(folder: str) -> dict[str, Any]:
    """Read a graph and its reference, and warm the peer up on a small graph."""
    small = Edges(*np.random.default_rng(0).integers(0, 100, (2, 500)), 100)
    PEER.read(small, PEER.solve(PEER.build(small), Question(), PEER.first(1e-3, 100)))
    # one copy in memory for all peers; a peer that writes to the arrays gets its own copy
    names = ("src", "dst", "reference")
    arrays = {name: np.asarray(np.load(Path(folder) / f"{name}.npy", mmap_mode="c")) for name in names}
    HERE["edges"] = Edges(arrays["src"], arrays["dst"], len(arrays["reference"]))
    arrays["src"].max(initial=0), arrays["dst"].max(initial=0)  # touches all pages
    HERE["reference"], HERE["memory"] = arrays["reference"], _resident()
    _forget_peak()
    return {"num_nodes": HERE["edges"].num_nodes}


def build() -> dict[str, Any]:
    """Build the peer's graph again."""
    HERE["graph"] = None
    begin = time.perf_counter()
    HERE["graph"] = PEER.build(HERE["edges"])
    return {"seconds": time.perf_counter() - begin, "nbytes": _peak() - HERE["memory"]}


def solve(setting: Setting) -> dict[str, Any]:
    """Run one PageRank; return its seconds, its true L1 error and its memory."""
    begin = time.perf_counter()
    answer = PEER.solve(HERE["graph"], Question(), setting)
    seconds, nbytes = time.perf_counter() - begin, _peak() - HERE["memory"]
    scores = np.asarray(PEER.read(HERE["edges"], answer), np.float64)
    error = float(np.abs(scores - HERE["reference"]).sum())
    return {"seconds": seconds, "error": error, "nbytes": nbytes}


def _status(name: str) -> int | None:
    """Return a figure of this process in bytes, from Linux."""
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _resident() -> int:
    return _status("VmRSS") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _peak() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    """Reset Linux's peak of this process's memory."""
    file = Path("/proc/self/clear_refs")
    if file.exists():
        file.write_text("5")


def main() -> None:
    limit = int(sys.argv[2])
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some peers print
    requests = {function.__name__: function for function in (judge_cases, load, build, solve)}
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = requests[request.pop("do")](**request)
        except Exception as error:
            reply = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
