"""Runs and verifications to report on, made by the models that they shall follow."""

from __future__ import annotations

import json

from pdlcheck.report.records import (
    Agreement,
    PackageRanking,
    PropertyRecord,
    ReplicaRun,
    ReplicaTraining,
    SuiteRun,
    Verification,
    WorldTrial,
)
from pdlcheck.verification.saved import save_verification

__all__ = ["FAILURE", "REPLAY", "write_run", "write_verification"]

REPLAY = "pytest -k x"
FAILURE = 'rank 1: expected 3, got 4 <script>alert("no")</script>'


def write_run(path, *, right=True, slower=1.0, machine="EPYC"):
    """A run with an experiment of each kind of plot. ``right``: never to synchronise costs what the model says."""
    ways = {"": 1, " [every 2]": 2, " [every 4]": 4, " [every 10]": 10}
    seconds = {f"test_sync_every[2ranks-flat]{way}": (0.1 + 0.3 / k, {}) for way, k in ways.items()}
    seconds["test_sync_every[2ranks-flat] [never]"] = (0.1 if right else 0.5, {})
    for nbytes in (4, 2**16, 2**24):
        facts = {"nbytes": nbytes, "algbw_GBps": 1.0, "busbw_GBps": 1.0}
        seconds[f"test_all_reduce[2ranks-{nbytes}B]"] = (1e-3 + nbytes / 1e9, facts)
        seconds[f"test_all_reduce[2ranks-{nbytes}B] [torch]"] = (2e-3 + nbytes / 1e9, facts)
    seconds["test_socket[2ranks]"] = (0.01, {"nbytes": 2**24, "algbw_GBps": 2.0, "busbw_GBps": 2.0})
    for ranks, threads, value in ((1, 1, 0.2), (2, 1, 0.1), (2, 2, 0.5)):
        seconds[f"test_processes_and_threads[{ranks}ranks-{threads}threads]"] = (value, {})
    for ranks in (1, 2):
        seconds[f"test_weak_scaling[{ranks}ranks]"] = (1.0 + ranks / 10, {"steps": 2, "gradient_bytes": 1_024_000})
    bubble = "test_bubble_of_sleeping_stages[2ranks-4microbatches-gpipe]"
    seconds[bubble] = (5 * 3 * 0.02, {"stage_s": 0.02})
    seconds[f"{bubble} [half of T]"] = (5 * 3 * 0.01, {})
    for ranks in (1, 2):
        seconds[f"test_shard_digest[{ranks}ranks]"] = (0.001 * slower, {})
    path.write_text(
        json.dumps(
            {
                "benchmarks": [_row(name, *found) for name, found in seconds.items()],
                "machine_info": {"pdlcheck": {"cpu": machine, "usable_cores": 2, "packages": {"torch": "2.13.0"}}},
                "commit_info": {"id": "0123456789abcdef"},
                "datetime": "2026-11-28T01:02:03",
            }
        )
    )
    return path


def _row(name, median, facts):
    rounds = [median * (1 + 0.001 * place) for place in (-2, -1, 0, 1, 2, 0)]
    more = {"world_size": 2, "device": "cpu", "median_s": median, "pass_rounds": [2, 2, 2]}
    more |= {"median_low_s": 0.9 * median, "median_high_s": 1.2 * median} | facts
    _, _, way = name.removesuffix("]").partition(" [")
    if way:
        more["way"] = way
    elif name.startswith("test_all_reduce"):
        more["over"] = {"torch": [0.5, 0.4, 0.6]}
    return {
        "name": name,
        "fullname": f"benchmarks/some.py::{name}",
        "stats": {"data": rounds, "median": median},
        "extra_info": more,
    }


def write_verification(path, *, held=True):
    """A property that holds, one that is skipped, and one that fails unless ``held``."""
    outcome, detail = ("holds", "") if held else ("fails", FAILURE)
    records = [
        PropertyRecord("test_comm.py::test_sum[sim]", "ring_all_reduce", "sim", outcome, 20, 1.5, detail, REPLAY),
        PropertyRecord("test_comm.py::test_sum[gloo]", "ring_all_reduce", "gloo", "holds", 20, 2.5),
        PropertyRecord("test_comm.py::test_gpu[sim]", "broadcast", "sim", "skipped", 0, 0.0, "needs a GPU"),
    ]
    worlds = [WorldTrial("sim", True, 0.1), WorldTrial("mpi", False, 0.0, "mpi4py is missing", "pip install mpi4py")]
    packages = PackageRanking([("libc6", 0.1)], 100, 1e-9, [Agreement("debian", 10, 20, ["v0", "v1"], 1e-12)], [], 1.0)
    replicas = ReplicaTraining("LeNet, 1 epoch", [ReplicaRun(2, 0.5, 0.9, 1e-16, True, 1.0)], 1e-12)
    found = Verification(worlds, SuiteRun(records, 4.0), packages, replicas, held, 9.0)
    save_verification(path, found)
    return path
