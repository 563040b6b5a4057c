"""The Chrome trace of a run, in JSON; Perfetto and chrome://tracing open it.

A rank is a process with three threads: its program, the sends of its network port (with collectives), and the receives.
Boxes of one thread would have to nest. A flow joins the two ends of a message. Times are in microseconds; in a run
without a topology, one step is one microsecond.

Source: "Trace Event Format", Google (2016).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from pdlcheck.clock.record import Run, Span

__all__ = ["chrome_trace"]

_THREADS = ("program", "network out", "network in")


def chrome_trace(run: Run) -> str:
    """Return the JSON of a run."""
    document = {"traceEvents": list(_events(run)), "displayTimeUnit": "ms", "otherData": {"ranks": run.world_size}}
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def _events(run: Run) -> Iterator[dict[str, Any]]:
    scale = 1.0 if run.in_steps else 1e6
    last = max((t for span in run.spans for t in (span.start_s, span.end_s) if t < math.inf), default=0.0)
    horizon = last * 1.1 or 1.0  # where spans without an end are cut off
    for rank in range(run.world_size):
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for thread, name in enumerate(_THREADS):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
    for span in run.spans:
        end = min(span.end_s, horizon)
        yield {
            "ph": "X",
            "name": _name(span),
            "cat": span.kind,
            "pid": span.rank,
            "tid": _thread(span),
            "ts": span.start_s * scale,
            "dur": (end - span.start_s) * scale,
            "args": {"what": span.what, "at": span.where, "nbytes": span.nbytes, "never ends": span.never_ends},
        }
    for number, message in enumerate(run.messages):
        flow = {"cat": "message", "name": "message", "id": number, "ts": message.start_s * scale}
        yield {"ph": "s", "pid": message.src, "tid": 1, **flow}
        yield {"ph": "f", "bp": "e", "pid": message.dst, "tid": 2, **flow}


def _name(span: Span) -> str:
    return f"wait: {span.op}" if span.kind == "wait" else span.op


def _thread(span: Span) -> int:
    return 0 if span.kind != "communication" else 2 if span.op == "recv" else 1
