"""The arguments of ``pdlcheck bench``, and its exit code."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pdlcheck.exit_codes import FAILED, HELD, INTERRUPTED, USAGE
from pdlcheck.extras import extra
from pdlcheck.whole_numbers import whole_number
from pdlcheck.worlds.choices import DEVICES, MOST_RANKS
from pdlcheck.worlds.registry import WORLDS

__all__ = ["add_bench_command", "run_bench_command"]

DESCRIPTION = """\
Measure the primitives, and those of torch beside them, on ranks of this machine or of a launcher:

  pdlcheck bench                                   two ranks on gloo, 3 minutes
  pdlcheck bench comm sync --ranks 1,2,4           two of the suites, on three numbers of ranks
  pdlcheck bench test_my_step.py --json mine.json  your own tests with the fixture rank_benchmark
  pdlcheck bench --device cuda --world nccl --ranks 1,2,4,8 --full --json h100.json
  torchrun --nproc-per-node 8 -m pdlcheck bench --world nccl --ranks 8

A row is the median over rounds of the slowest rank, with its 95 % interval; functions that are
compared take turns, and the row has the ratio of their times. The JSON file is that of
pytest-benchmark, and `pdlcheck compare A.json B.json` reads two or more of them.
"""

CODES = """\
exit code: 0 if every benchmark ran and its result was right, 1 if not, 2 for wrong arguments.
"""


def add_bench_command(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add the parser to ``commands``, the result of ``add_subparsers``."""
    parser = commands.add_parser(
        "bench",
        help="measure the primitives on this machine",
        description=DESCRIPTION,
        epilog=CODES,
        formatter_class=formatter,
    )
    parser.add_argument(
        "suites",
        metavar="SUITE",
        nargs="*",
        help="such as comm or pagerank, or a file of your own tests; default: all suites",
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="of the tensors; default: %(default)s")
    worlds = sorted(set(WORLDS) - {"sim"})
    parser.add_argument(
        "--world",
        choices=worlds,
        help=f"where ranks run: {', '.join(worlds)}; default: gloo, and nccl for --device cuda if there are enough",
    )
    parser.add_argument(
        "--ranks", metavar="N[,N]", type=_ranks, default=[2], help="numbers of ranks, such as 1,2,4; default: 2"
    )
    parser.add_argument("--full", action="store_true", help="larger inputs and more rounds; takes long")
    parser.add_argument(
        "--passes",
        metavar="N",
        type=whole_number,
        default=3,
        help="run everything N times, each time in new processes: intervals and pdlcheck compare need 3 or more; "
        "default: %(default)s",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all rows and the machine to this file")


def run_bench_command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from rich.console import Console

    from pdlcheck.benchmarking.session import Plan, UsageError, run_benchmarks

    with extra("bench", "pdlcheck bench"):
        import pytest_benchmark  # noqa: F401
        import scipy  # noqa: F401
    plan = Plan(
        suites=tuple(arguments.suites),
        device=arguments.device,
        world=arguments.world,
        ranks=tuple(arguments.ranks),
        full=arguments.full,
        passes=arguments.passes,
        json=arguments.json and Path(os.path.abspath(arguments.json)),
    )
    try:
        held = run_benchmarks(Console(highlight=False), plan)
    except UsageError as error:
        print(f"pdlcheck bench: {error}", file=sys.stderr)
        return USAGE
    except FileNotFoundError as error:
        print(f"pdlcheck bench: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("pdlcheck bench: interrupted", file=sys.stderr)
        return INTERRUPTED
    return HELD if held else FAILED


def _ranks(text: str) -> list[int]:
    sizes = text.split(",")
    if not all(size.isdecimal() and 1 <= int(size) <= MOST_RANKS for size in sizes):
        raise argparse.ArgumentTypeError(f"must be numbers of ranks, such as 1,2,4; got {text!r}")
    return sorted({int(size) for size in sizes})
