"""The reader of pytest-benchmark's JSON files, which ``pdlcheck bench`` and ``--benchmark-json`` write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Measured", "Run", "UnreadableRun", "read_json", "read_run", "run_of", "short_names"]


class UnreadableRun(Exception):
    """A file is not a run of benchmarks; the message names it."""


@dataclass(frozen=True)
class Measured:
    """One row of a run.

    Args:
        name: name of the benchmark.
        subject: for one of the other functions, the name of the row that it is compared with in its run.
        seconds: seconds of each round; only the median if the file has no rounds.
        facts: further columns.
    """

    name: str
    subject: str | None
    seconds: Sequence[float]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One file.

    Args:
        path: path of the file.
        rows: rows by full name, in the order of the file.
        machine: processor, devices and versions, by name.
        commit: the beginning of its hash; empty if it is unknown.
        moment: the date and time of the measurement, as in the file.
    """

    path: Path
    rows: Mapping[str, Measured]
    machine: Mapping[str, str]
    commit: str
    moment: str


def read_run(path: Path) -> Run:
    """Return the run in a file.

    Raises:
        UnreadableRun: the file does not exist, is not JSON, or is not from pytest-benchmark.
    """
    return run_of(path, read_json(path))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        UnreadableRun: the file does not exist, or is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UnreadableRun(f"{path}: {error.strerror}") from None
    except (RecursionError, ValueError) as error:
        raise UnreadableRun(f"{path} is no JSON: {error}") from None


def run_of(path: Path, found: Any) -> Run:
    """Return the run from the content of a file.

    Raises:
        UnreadableRun: the content is not from pytest-benchmark.
    """
    try:
        rows = {row["fullname"]: _measured(row) for row in found["benchmarks"]}
        machine = _machine(found.get("machine_info") or {})
        commit = str((found.get("commit_info") or {}).get("id") or "").replace("unversioned", "")[:10]
        return Run(path, rows, machine, commit, str(found.get("datetime", ""))[:16])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnreadableRun(
            f"{path} is no run of pytest-benchmark ({type(error).__name__}: {error}); write one with "
            "`pdlcheck bench --json FILE` or `pytest --benchmark-json FILE`"
        ) from None


def short_names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run: the name of its file, with the folders above if files have the same name."""
    depth = 1
    while depth < 20 and len({_tail(run.path, depth) for run in runs}) < len(runs):
        depth += 1
    return [_tail(run.path, depth) for run in runs]


def _tail(path: Path, depth: int) -> str:
    return "/".join(path.absolute().with_suffix("").parts[-depth:])


def _measured(row: Mapping[str, Any]) -> Measured:
    facts, stats = row.get("extra_info") or {}, row["stats"]
    seconds = [float(one) for one in stats.get("data") or [stats["median"]]]
    if not all(one >= 0 for one in seconds) or not seconds:
        raise ValueError(f"{row['fullname']} has the times {seconds[:3]}")
    subject = row["fullname"].removesuffix(f" [{facts['way']}]") if "way" in facts else None
    return Measured(str(row["name"]), subject, seconds, facts)


def _machine(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns that differ between machines users compare."""
    ours, cpu = info.get("pdlcheck") or {}, info.get("cpu") or {}
    gpus = [gpu["name"] for gpu in ours.get("gpus", [])]
    found = {
        "processor": ours.get("cpu") or cpu.get("brand_raw"),
        "usable cores": ours.get("usable_cores") or cpu.get("count"),
        "memory": f"{ours['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in ours else None,
        "devices": ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or None,
        "system": ours.get("system") or f"{info.get('system', '')} {info.get('release', '')}".strip(),
        "python": info.get("python_version"),
        "cuda": ours.get("cuda"),
        "nccl": ours.get("nccl"),
        **(ours.get("packages") or {}),
    }
    return {name: str(value) for name, value in found.items() if value}
