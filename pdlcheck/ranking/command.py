"""The command ``pdlcheck pagerank``: its arguments and its exit codes."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

from pdlcheck.exit_codes import FAILED, HELD, INTERRUPTED
from pdlcheck.whole_numbers import whole_number

__all__ = ["add_pagerank_command", "run_pagerank_command"]

FORMATS = ("konect", "matrix-market", "metis", "npz", "parquet", "text")  # as in pdlcheck.primitives.pagerank.files
OUTPUTS = (".csv", ".json", ".npz", ".parquet")
DELIMITERS = {"tab": "\t", "comma": ",", "semicolon": ";", "space": " ", "\\t": "\t"}

DESCRIPTION = """\
Rank the nodes of a file of edges and print the best. A line of text is `src dst` or `src dst
weight`, between blanks, tabs, commas, semicolons or |, with or without a header and quotes;
node ids are integers or strings; lines that begin with # or % are comments. Also KONECT, SNAP,
Matrix Market, METIS, .npz and .parquet; packed by gzip, bzip2, xz or zstd. Only nodes that have
an edge are ranked. Progress, and how the file was read, go to stderr.
"""

CODES = """\
exit code: 0 if the ranks are within --tol of the true ones, 1 if they are not, or the file is
wrong or too large for the memory, 2 for wrong arguments.
"""


def add_pagerank_command(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add the parser to ``commands``, which ``add_subparsers`` returned."""
    parser = commands.add_parser(
        "pagerank",
        help="rank the nodes of a file of edges",
        description=DESCRIPTION,
        epilog=CODES,
        formatter_class=formatter,
    )
    parser.add_argument("file", metavar="FILE", type=_file, help="where the edges are; - is standard input")
    parser.add_argument(
        "--top", metavar="N", type=whole_number, default=20, help="nodes to print; default: %(default)s"
    )
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
    parser.add_argument(
        "--output",
        metavar="SCORES",
        type=_output,
        help=f"write all scores to this file, too; it ends in {', '.join(OUTPUTS)}",
    )
    reading = parser.add_argument_group("how the file is read, where it does not say so itself")
    reading.add_argument("--format", choices=FORMATS, help="default: by the first bytes, or else the suffix")
    reading.add_argument(
        "--columns",
        metavar="SRC,DST[,WEIGHT]",
        type=_columns,
        help="columns of an edge: names of the header, or numbers from 1",
    )
    reading.add_argument(
        "--delimiter", metavar="C", type=_delimiter, help=f"one character between fields, or {', '.join(DELIMITERS)}"
    )
    either = argparse.BooleanOptionalAction
    reading.add_argument("--header", action=either, help="whether the first line holds names of columns")
    reading.add_argument("--names", action="store_true", help="ids are strings, also where they are numbers")
    reading.add_argument("--weights", action=either, help="whether the third column holds weights")
    reading.add_argument("--undirected", action="store_true", help="each edge goes both ways")
    reading.add_argument(
        "--num-nodes", metavar="N", type=whole_number, help="rank the nodes 0 to N - 1, with or without edges"
    )


def run_pagerank_command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code; an error about the file is one line on stderr."""
    output, file = arguments.output, arguments.file
    if output is not None and file is not None and output.exists() and output.samefile(file):
        parser.error(f"argument --output: must not be FILE, whose edges would be lost; got {str(output)!r}")
    try:
        from rich.console import Console

        from pdlcheck.primitives.pagerank.files import Choice, read_edge_file
        from pdlcheck.ranking.run import rank_file

        try:
            choice = Choice(
                arguments.columns, arguments.delimiter, arguments.header, arguments.names, arguments.weights
            )
        except ValueError as error:
            parser.error(str(error))
        converged = rank_file(
            lambda progress: read_edge_file(
                sys.stdin.buffer if file is None else file,
                choice,
                format=arguments.format,
                undirected=arguments.undirected,
                num_nodes=arguments.num_nodes,
                progress=progress,
            ),
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


def _file(text: str) -> Path | None:
    """Return the path of a file or a pipe; ``None`` for standard input."""
    if text == "-":
        if sys.stdin is None:
            raise argparse.ArgumentTypeError("must be a file of edges; standard input is closed")
        return None
    path = Path(text)
    if not (path.is_file() or path.is_fifo()):
        raise argparse.ArgumentTypeError(f"must be a file of edges, or - for standard input; there is none at {text!r}")
    return path


def _output(text: str) -> Path:
    path = Path(text)
    in_the_way = path.exists() and not path.is_file()
    if path.suffix not in OUTPUTS or in_the_way or not os.access(path.parent, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(
            f"must be a file that ends in {', '.join(OUTPUTS)}, in a folder that exists and can be written; "
            f"got {text!r}"
        )
    return path


def _columns(text: str) -> tuple[str | int, ...]:
    columns = tuple(int(name) if name.isdecimal() else name for name in map(str.strip, text.split(",")))
    if len(columns) not in (2, 3) or len(set(columns)) < len(columns) or not all(columns):
        raise argparse.ArgumentTypeError(
            f"must be SRC,DST or SRC,DST,WEIGHT, all different, names or numbers from 1; got {text!r}"
        )
    return columns


def _delimiter(text: str) -> str:
    if len(DELIMITERS.get(text, text)) != 1:
        raise argparse.ArgumentTypeError(f"must be one character, or {', '.join(DELIMITERS)}; got {text!r}")
    return DELIMITERS.get(text, text)


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
