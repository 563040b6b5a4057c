"""The command ``pdlcheck``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pdlcheck import __version__
from pdlcheck.benchmarking.command import add_bench_command, run_bench_command
from pdlcheck.comparison.command import add_compare_command, run_compare_command
from pdlcheck.exit_codes import FAILED, HELD, INTERRUPTED, USAGE
from pdlcheck.explanation.command import add_explain_command, run_explain_command
from pdlcheck.extras import MissingExtra
from pdlcheck.presentation.command import add_report_command, run_report_command
from pdlcheck.ranking.command import add_pagerank_command, run_pagerank_command
from pdlcheck.report.files import why_not_writable
from pdlcheck.scripts.command import add_run_command, run_run_command
from pdlcheck.tracing.command import add_compare_traces_command, run_compare_traces_command
from pdlcheck.whole_numbers import whole_number
from pdlcheck.worlds.registry import worlds_on

__all__ = ["main"]

SUITED = worlds_on("cpu")  # the suites use CPU tensors

EXAMPLES = """\
examples:
  pdlcheck run -n 4 train.py             a training script on four simulated ranks
  pdlcheck explain dumps/                what the dumps of torch's Flight Recorder show
  pdlcheck verify                        the suites on every world that works here, then real input
  pdlcheck verify --world sim            on simulated ranks only
  pdlcheck verify --examples 200         try harder
  pdlcheck verify --world sim,gloo --subject ring_all_reduce=mine.comm:all_reduce
                                         the suites of one primitive on your own function
  pdlcheck bench --json a.json           the speed of the primitives here, 3 minutes
  pdlcheck compare a.json b.json         what became slower from one run to the next
  pdlcheck compare-traces trusted mine   the first module in which a parallel run is wrong
  pdlcheck report a.json                 the run as a page: sentences, plots, tables
  pdlcheck pagerank edges.txt --top 20   the best nodes of a file of edges, within 1e-8 of the truth
  pdlcheck doctor                        what is there, and the command for what is not
"""

VERIFY = """\
Run the suites and print one table: primitive, world, properties, examples tried, verdict,
seconds. Failures follow in full, each with the command that replays it. Then PageRank of
the Debian packages by all versions, and LeNet trained on 1, 2 and 4 replicas.
"""

CODES = """\
exit code: 0 if everything held, 1 if something failed, 2 for wrong arguments.
A missing optional part (DGL, scikit-learn, CUDA) is named with the command that brings it;
it is no failure.
"""

DOCTOR = """\
Print what this machine has: python, torch, devices, backends, worlds (each is tried with two
ranks), packages; for whatever is missing, how to get it.
"""

DOCTOR_CODES = """\
exit code: 0 if everything required is there and works: the worlds sim and gloo, and the packages
that `pip install pdlcheck` brings; 1 if not, 2 for wrong arguments. To fail where a world or a
device is missing, run the tests with `pytest --no-skip-worlds --require-gpu`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return USAGE
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot write must not end the command
    commands = {
        "run": run_run_command,
        "explain": run_explain_command,
        "verify": _verify,
        "bench": run_bench_command,
        "compare": run_compare_command,
        "compare-traces": run_compare_traces_command,
        "report": run_report_command,
        "pagerank": run_pagerank_command,
        "doctor": _doctor,
    }
    try:
        return commands[arguments.command](parser, arguments)
    except MissingExtra as error:
        print(f"pdlcheck {arguments.command}: {error}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "pdlcheck",
        description="Verify parallel PyTorch primitives on simulated ranks and on real processes.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"pdlcheck {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_run_command(commands, raw)
    add_explain_command(commands, raw)
    verify = commands.add_parser(
        "verify",
        help="run the suites and the primitives on real input",
        description=VERIFY,
        epilog=CODES,
        formatter_class=raw,
    )
    verify.add_argument(
        "--world",
        metavar="NAME[,NAME]",
        type=_worlds,
        help=f"where ranks run: {', '.join(SUITED)}; default: all that work on this machine",
    )
    verify.add_argument(
        "--examples",
        metavar="N",
        type=whole_number,
        default=20,
        help="examples tried for each property; default: %(default)s",
    )
    verify.add_argument(
        "--subject",
        metavar="NAME=MODULE:FUNCTION",
        type=_subject,
        action="append",
        default=[],
        help="run only the suites of primitive NAME, on your own function; may be repeated",
    )
    verify.add_argument("--json", metavar="FILE", type=Path, help="write what was found, for `pdlcheck report`")
    add_bench_command(commands, raw)
    add_compare_command(commands, raw)
    add_compare_traces_command(commands, raw)
    add_report_command(commands, raw)
    add_pagerank_command(commands, raw)
    doctor = commands.add_parser(
        "doctor",
        help="list what this machine has, and how to get what is missing",
        description=DOCTOR,
        epilog=DOCTOR_CODES,
        formatter_class=raw,
    )
    doctor.add_argument("--json", action="store_true", help="print the list as JSON, for programs")
    return parser


def _verify(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from pdlcheck.verification.run import UsageError, verify
    from pdlcheck.verification.saved import save_verification

    path: Path | None = arguments.json and arguments.json.absolute()
    if path is not None and (why := why_not_writable(path)):  # check it before minutes of tests, not after them
        parser.exit(USAGE, f"pdlcheck verify: --json {arguments.json} cannot be written: {why}\n")
    sys.path.insert(0, os.getcwd())  # find the user's own function, as `python -m` does
    try:
        found = verify(
            Console(highlight=False),
            worlds=arguments.world,
            examples=arguments.examples,
            subjects=arguments.subject,
        )
    except UsageError as error:
        parser.exit(USAGE, f"pdlcheck verify: {error}\n")
    except FileNotFoundError as error:
        parser.exit(FAILED, f"pdlcheck verify: {error}\n")
    except KeyboardInterrupt:
        parser.exit(INTERRUPTED, "pdlcheck verify: interrupted\n")
    if path is not None:
        save_verification(path, found)
    return HELD if found.held else FAILED


def _doctor(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from pdlcheck.doctor import examine
    from pdlcheck.report.tables import parts_json, parts_table

    progress = Console(stderr=True, highlight=False)
    with progress.status("looking at this machine") as status:

        def trying(name: str) -> None:
            status.update(words := f"trying the world {name} with two ranks")
            if not progress.is_terminal:
                progress.print(words)

        parts = examine(trying)
    if arguments.json:
        print(parts_json(parts))
    else:
        Console(highlight=False).print(parts_table(parts))
    return FAILED if any(part.required and part.is_missing for part in parts) else HELD


def _worlds(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in SUITED:
            raise argparse.ArgumentTypeError(f"must name some of {', '.join(SUITED)}; got {name!r}")
    return names


def _subject(text: str) -> str:
    name, _, target = text.partition("=")
    module, _, function = target.partition(":")
    if not (name and module and function) or ":" in function:
        raise argparse.ArgumentTypeError(f"takes NAME=MODULE:FUNCTION; got {text!r}")
    return text
