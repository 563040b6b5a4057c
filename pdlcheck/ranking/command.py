"""The command ``pdlcheck pagerank``: its arguments, and what it ends with."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from pdlcheck.exit_codes import FAILED, HELD, INTERRUPTED

__all__ = ["add_pagerank_command", "run_pagerank_command"]

DESCRIPTION = """\
Rank the nodes of a file of edges and print the best. A line of text is `src dst` or `src dst
weight`, with blanks, tabs or commas between; nodes are whole numbers from 0; lines that begin
with # or % are comments. Also text in .gz, arrays src, dst, weights in .npz, columns src, dst,
weight in .parquet. Progress goes to stderr.
"""

CODES = """\
exit code: 0 if the ranks are within --tol of the true ones, 1 if they are not, or the file is
wrong or too large for the memory, 2 for wrong arguments.
"""


def add_pagerank_command(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add the parser to ``commands``, what ``add_subparsers`` returned."""
    parser = commands.add_parser(
        "pagerank",
        help="rank the nodes of a file of edges",
        description=DESCRIPTION,
        epilog=CODES,
        formatter_class=formatter,
    )
    parser.add_argument("file", metavar="FILE", type=_file, help="where the edges are; the suffix says how")
    parser.add_argument("--top", metavar="N", type=_count, default=20, help="nodes to print; default: %(default)s")
    parser.add_argument(
        "--damping", metavar="D", type=_damping, default=0.85, help="from 0 to below 1; default: %(default)s"
    )
    parser.add_argument(
        "--tol",
        metavar="E",
        type=_tol,
        default=1e-8,
        help="largest sum of errors over all nodes; default: %(default)s",
    )
    parser.add_argument("--output", metavar="SCORES.npz", type=_npz, help="write all scores to this file, too")


def run_pagerank_command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run it and return the exit code; errors about the file are one line on stderr."""
    if arguments.output is not None and arguments.output.exists() and arguments.output.samefile(arguments.file):
        parser.error(f"argument --output: must not be FILE, whose edges would be lost; got {str(arguments.output)!r}")
    try:
        from rich.console import Console

        from pdlcheck.ranking.run import rank_file

        converged = rank_file(
            arguments.file,
            damping=arguments.damping,
            tol=arguments.tol,
            top=arguments.top,
            output=arguments.output,
            console=Console(highlight=False),
            errors=Console(stderr=True, highlight=False),
        )
    except (ValueError, TypeError, MemoryError, OSError, ImportError) as error:
        parser.exit(FAILED, f"pdlcheck pagerank: {error}\n")
    except KeyboardInterrupt:
        parser.exit(INTERRUPTED, "pdlcheck pagerank: interrupted\n")
    if not converged:
        said = f"float64 cannot promise --tol {arguments.tol:g} here; use a larger one"
        parser.exit(FAILED, f"pdlcheck pagerank: {said}\n")
    return HELD


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_fifo():
        raise argparse.ArgumentTypeError(f"must be a file of edges; {text!r} is a pipe, write it to a file first")
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"must be a file of edges; there is none at {text!r}")
    return path


def _npz(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".npz" or path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(
            f"must be a file that ends in .npz, in a folder that exists and can be written; got {text!r}"
        )
    return path


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def _damping(text: str) -> float:
    if not 0 <= (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to below 1; got {text!r}")
    return value


def _tol(text: str) -> float:
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
