"""All peers on one graph: built, tuned to each error, then timed in turn, round by round."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ranking.peer import Peer
from ranking.process import PeerProcess
from ranking.tuning import Tuned, tune

__all__ = ["Row", "measure"]

REBUILD_S = 3.0  # a build that takes longer is done once


@dataclass
class Row:
    """One peer on one graph.

    Args:
        peer: its name.
        why: the reason if it has no figures at all.
        build_s: seconds, one a round; a single one if a build takes long.
        tuned: wanted error -> result of the search.
        solve_ms: wanted error -> milliseconds, one a round; none if the error was not reached.
        nbytes: peak memory during build and one solve, minus the memory with the edges loaded.
    """

    peer: str
    why: str = ""
    build_s: list[float] = field(default_factory=list)
    tuned: dict[float, Tuned] = field(default_factory=dict)
    solve_ms: dict[float, list[float]] = field(default_factory=dict)
    nbytes: int = 0

    def solved(self, error: float) -> bool:
        return bool(self.solve_ms.get(error))

    def total_ms(self, error: float) -> float:
        """Return the sum of the medians of build and solve."""
        return median(self.build_s) * 1e3 + median(self.solve_ms[error])

    def record(self) -> dict[str, Any]:
        """Return the row as data for JSON."""
        found = asdict(self)
        found["tuned"] = {f"{error:g}": tuned for error, tuned in found["tuned"].items()}
        found["solve_ms"] = {f"{error:g}": ms for error, ms in found["solve_ms"].items()}
        return found


def measure(
    folder: Path, peers: Sequence[Peer], errors: Sequence[float], rounds: int, *, limit_s: float, limit_nbytes: int
) -> tuple[list[Row], list[float]]:
    """Return rows in the order of ``peers`` for the graph in ``folder``, and the machine's load before each round."""
    processes = {peer.name: PeerProcess(peer, memory_limit=limit_nbytes) for peer in peers}
    rows = {peer.name: Row(peer.name) for peer in peers}
    loads = []
    try:
        for peer in peers:
            print(f"  {peer.name}: build and search", file=sys.stderr, flush=True)
            _prepare(processes[peer.name], rows[peer.name], folder, errors, limit_s)
        for number in range(rounds):
            loads.append(os.getloadavg()[0])
            print(f"  round {number + 1} of {rounds}; load of the machine {loads[-1]:.1f}", file=sys.stderr, flush=True)
            for name, row in rows.items():
                if not processes[name].over:
                    _one_round(processes[name], row, limit_s)
    finally:
        for process in processes.values():
            process.close()
    return list(rows.values()), loads


def _prepare(process: PeerProcess, row: Row, folder: Path, errors: Sequence[float], limit_s: float) -> None:
    loaded = process.ask("load", timeout_s=limit_s, folder=str(folder))
    built = loaded if "failed" in loaded else process.ask("build", timeout_s=limit_s)
    if "failed" in built:
        row.why = built["failed"]
        process.close()
        process.over = row.why
        return
    row.build_s.append(built["seconds"])
    peer = process.peer

    def solve(setting: Any) -> dict[str, Any]:
        if process.over:
            return {"failed": process.over}
        reply = process.ask("solve", timeout_s=limit_s, setting=setting)
        row.nbytes = max(row.nbytes, reply.get("nbytes", 0))
        return reply

    for error in errors:
        if peer.guarantees:
            reply = solve(error)
            row.tuned[error] = Tuned(error, reply.get("error"), reply.get("failed", ""))
        else:
            row.tuned[error] = tune(solve, peer.first(error, loaded["num_nodes"]), error)
        if not row.tuned[error].why:
            row.solve_ms[error] = []


def _one_round(process: PeerProcess, row: Row, limit_s: float) -> None:
    if row.build_s[0] < REBUILD_S:
        built = process.ask("build", timeout_s=limit_s)
        if "failed" not in built:
            row.build_s.append(built["seconds"])
    for error, ms in row.solve_ms.items():
        reply = process.ask("solve", timeout_s=limit_s, setting=row.tuned[error].setting)
        if "failed" in reply:
            return
        ms.append(reply["seconds"] * 1e3)
