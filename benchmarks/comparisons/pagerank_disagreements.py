"""Count how often PageRank of each package differs from the dense float64 solution, on many small drawn graphs.

Usage: python benchmarks/comparisons/pagerank_disagreements.py [--cases 10000] [--seed 0] [--peers NAMES] [--json FILE]
       python benchmarks/comparisons/pagerank_disagreements.py --case NUMBER [--peers NAMES]

Ours must agree within the bound that it states. A peer runs at its strictest setting and must come within 1e-6 in L1.
It is judged only on the features that its documentation claims; the other cases count as not supported. "By default" is
the same without any setting: the number of answers that are off by more than 1e-6, and the largest error. `--case`
prints one case and each answer to it. Each peer runs in its own process. A peer that dies or takes longer than 60
seconds over a case has no answer. The exit code is 1 if ours disagrees.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.machine import this_machine
from ranking.drawn import draw
from ranking.judged import AGREES, LIMIT, NOT_SUPPORTED
from ranking.process import PeerProcess
from ranking.registry import FOR_TRUTH, VERSIONS, chosen
from rich.console import Console
from rich.progress import track
from rich.table import Table

TIMEOUT_S = 60
BATCH = 50  # number of cases in one request
Verdicts = list[dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--peers", default="", help="words of the names wanted, with commas; default: all installed")
    parser.add_argument("--case", type=int, help="only this one, with each answer")
    parser.add_argument("--json", type=Path, help="save the counts, after each peer")
    options = parser.parse_args()
    peers, load = chosen(FOR_TRUTH, options.peers), [os.getloadavg()[0]]
    numbers = range(options.cases) if options.case is None else [options.case]
    if options.case is not None:
        print(repr(draw(options.case, options.seed)))
    found: dict[str, dict[str, Any]] = {}
    for peer in peers:
        begin = time.perf_counter()
        process = PeerProcess(peer, threads=1)
        try:
            verdicts = _ask_all(process, numbers, options.seed)
        finally:
            process.close()
        found[peer.name] = _counted(verdicts) | {"seconds": time.perf_counter() - begin}
        load.append(os.getloadavg()[0])
        if options.json:
            record = {"machine": this_machine(VERSIONS), "load": load, "cases": len(numbers), "seed": options.seed}
            options.json.write_text(json.dumps(record | {"peers": found}, indent=1) + "\n")
    _print_table(found, len(numbers))
    ours = sum(counts["disagreements"] for name, counts in found.items() if name.startswith("pdlcheck"))
    return 1 if ours else 0


def _ask_all(process: PeerProcess, numbers: Sequence[int], seed: int) -> Verdicts:
    """Send the cases in batches; if the peer does not survive a batch, send its cases one by one."""
    verdicts: Verdicts = []
    console = Console(stderr=True)
    starts = range(0, len(numbers), BATCH)
    for begin in track(starts, process.peer.name, console=console, disable=not sys.stderr.isatty(), transient=True):
        batch = list(numbers[begin : begin + BATCH])
        for cases in [batch, *([number] for number in batch)]:
            reply = process.ask("judge_cases", timeout_s=TIMEOUT_S, numbers=cases, seed=seed)
            if "failed" not in reply:
                verdicts += reply["verdicts"]
            elif len(cases) == 1:
                lost = {"kind": f"no answer: {reply['failed']}", "error": None}
                verdicts.append({"number": cases[0], "strict": lost, "usual": None})
            if cases is batch and len(verdicts) == begin + len(batch):
                break
    return verdicts


def _counted(verdicts: Verdicts) -> dict[str, Any]:
    strict = [verdict["strict"] | {"number": verdict["number"]} for verdict in verdicts]
    usual = [verdict["usual"] for verdict in verdicts if verdict["usual"]]
    judged = [verdict for verdict in strict if verdict["kind"] != NOT_SUPPORTED]
    kinds: dict[str, Verdicts] = defaultdict(list)
    for verdict in judged:
        if verdict["kind"] != AGREES:
            kinds[verdict["kind"]].append(verdict)
    errors = [verdict["error"] for verdict in usual if verdict["error"] is not None]
    return {
        "judged": len(judged),
        "not_supported": len(strict) - len(judged),
        "disagreements": sum(map(len, kinds.values())),
        "worst_error": _worst(judged),
        "kinds": {
            kind: {"count": len(cases), "worst_error": _worst(cases), "first_case": cases[0]["number"]}
            for kind, cases in sorted(kinds.items(), key=lambda item: -len(item[1]))
        },
        "by_default_beyond_limit": sum(error > LIMIT for error in errors) if usual else None,
        "by_default_worst_error": max(errors, default=None),
    }


def _worst(verdicts: Verdicts) -> float | None:
    return max((verdict["error"] for verdict in verdicts if verdict["error"] is not None), default=None)


def _print_table(found: dict[str, dict[str, Any]], cases: int) -> None:
    table = Table(title=f"{cases} drawn graphs against the dense float64 solution", title_justify="left")
    table.add_column("solver", no_wrap=True)
    for head in ("judged", "not supported", "disagrees", "worst error", "by default off by > 1e-6"):
        table.add_column(head, justify="right")
    table.add_column("how, and the first case of it")
    for name, counts in found.items():
        kinds = [
            f"{of['count']} {kind}" + (f", by {of['worst_error']:.0e}" if of["worst_error"] else "")
            + f" (case {of['first_case']})"
            for kind, of in counts["kinds"].items()
        ]  # fmt: skip
        usual = counts["by_default_beyond_limit"]
        beside = "-" if usual is None else f"{usual}"
        if usual:
            beside += f" (by {counts['by_default_worst_error']:.0e})"
        table.add_row(
            *(name, str(counts["judged"]), str(counts["not_supported"]), str(counts["disagreements"])),
            *(_short(counts["worst_error"]), beside, "\n".join(kinds)),
            style=None if counts["disagreements"] else "green",
        )
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)


def _short(error: float | None) -> str:
    return "-" if error is None else f"{error:.0e}"


if __name__ == "__main__":
    sys.exit(main())
