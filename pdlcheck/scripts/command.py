"""The arguments of ``pdlcheck run``, and its exit code."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlcheck.errors import WorldUnavailable
from pdlcheck.exit_codes import FAILED, HELD, INTERRUPTED, USAGE
from pdlcheck.launch.environment import launch_of
from pdlcheck.report.files import why_not_writable
from pdlcheck.whole_numbers import whole_number
from pdlcheck.worlds.choices import DEVICES, SEMANTICS
from pdlcheck.worlds.registry import WORLDS, is_simulated

if TYPE_CHECKING:
    from pdlcheck.scripts.plan import Plan

__all__ = ["add_run_command", "run_run_command"]

DESCRIPTION = """\
Run a training script, unchanged, on simulated ranks or on processes, and report a hang, a
mismatch or an error: which rank, which call, which line.

  pdlcheck run -n 4 train.py --epochs 1             four simulated ranks, in one process
  pdlcheck run -n 4 --schedules 50 train.py         the same in 50 orders of the ranks
  pdlcheck run -n 4 --world gloo train.py           four processes
  pdlcheck run -n 2 -m package.train --epochs 1     a module
  torchrun --nproc-per-node 4 -m pdlcheck run train.py
  pdlcheck run -n 4 --faults kill:1@3 train.py      rank 1 is killed at its operation 3

The script gets the environment of torchrun. Options of pdlcheck come before the script.
"""

CODES = """\
exit code: 0 if every rank ended and no fault was seen, 1 if not, 2 for wrong arguments.
"""


def add_run_command(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add the parser to ``commands``, the result of ``add_subparsers``."""
    parser = commands.add_parser(
        "run",
        help="run a script on ranks, and say what is wrong with it",
        description=DESCRIPTION,
        epilog=CODES,
        formatter_class=formatter,
    )
    parser.add_argument("-n", dest="ranks", metavar="N", type=whole_number, help="number of ranks; default: 2")
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument("--world", metavar="NAME", choices=sorted(WORLDS), help=_WORLD)
    parser.add_argument("--device", choices=DEVICES, help="of the ranks; default: cuda on nccl, cpu elsewhere")
    parser.add_argument("--cuda-as-cpu", action="store_true", help=_CUDA_AS_CPU)
    parser.add_argument(
        "--seed", type=int, metavar="SEED", default=0, help="of random streams and schedule; default: 0"
    )
    parser.add_argument("--schedules", metavar="N", type=whole_number, default=1, help=_SCHEDULES)
    parser.add_argument("--schedule", metavar="SCHEDULE", help="the one schedule to run, as a replay line prints it")
    parser.add_argument("--semantics", choices=SEMANTICS, default="rendezvous", help=_SEMANTICS)
    parser.add_argument("--faults", metavar="FAULT[,FAULT]", default="", help=_FAULTS)
    parser.add_argument("--timeline", metavar="DIR", type=Path, help="on sim, draw what the ranks did, in this folder")
    parser.add_argument("--own-globals", metavar="MODULE", action="append", default=[], help=_OWN_GLOBALS)
    parser.add_argument("--compare-world-sizes", metavar="N,N", default="", help=_SIZES)
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="time limit of a run; default: none")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the verdict, for programs")
    parser.add_argument("program", metavar="PROGRAM", help="a script, or with -m a module")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="passed to the program")


_WORLD = (
    "where ranks run: sim (threads of one process), gloo, mpi or nccl (processes), or another; default: sim; "
    "gloo under a launcher"
)
_SCHEDULES = "on sim, run the program in N orders of the ranks, and shorten the first that fails; default: 1"
_SEMANTICS = "on sim, what the network does where the rules leave a choice; default: %(default)s"
_FAULTS = "on sim, what ranks suffer: kill:RANK@OPERATION, stall:RANK@OPERATION, corrupt:RANK@OPERATION, absent:RANK"
_CUDA_AS_CPU = "run the CUDA code of the script on the CPU: .cuda(), torch.cuda, the backend nccl"
_SIZES = "run on these numbers of ranks, such as 1,2,4: printed losses and saved weights must agree"
_OWN_GLOBALS = "on sim, an installed module whose globals each rank has for itself; may be repeated"
_OF_SIM = ("schedules", "schedule", "semantics", "faults", "timeline", "own_globals")


def run_run_command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    try:
        if (own := launch_of(os.environ)) is None:
            return _run(arguments)
        from pdlcheck.scripts.launched import run_launched

        if arguments.ranks not in (None, own.world_size):
            raise ValueError(f"{own.launcher} has launched {own.world_size} processes: leave -n {arguments.ranks} away")
        arguments.ranks, arguments.world = own.world_size, arguments.world or "gloo"
        return run_launched(own, arguments.seed, functools.partial(_run, arguments))
    except (ValueError, WorldUnavailable) as error:
        print(f"pdlcheck run: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("pdlcheck run: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: argparse.Namespace, placement: Any = None) -> int:
    from pdlcheck.scripts.progress import Progress
    from pdlcheck.scripts.session import run_program

    plan = _plan(arguments, placement)
    path: Path | None = arguments.json
    if path is not None and (why := why_not_writable(path)):
        raise ValueError(f"--json {path} cannot be written: {why}")
    with Progress().shown() as progress:
        finding = run_program(plan, progress)
    print(finding.text(), file=sys.stderr)
    if path is not None:
        path.write_text(json.dumps(finding.record(), indent=1) + "\n")
    return HELD if finding.held else FAILED


def _plan(arguments: argparse.Namespace, placement: Any) -> Plan:
    from pdlcheck.scripts.plan import Plan, fault_of
    from pdlcheck.scripts.program import find_program

    world = arguments.world or "sim"
    if not is_simulated(world):
        for name in _OF_SIM:
            if getattr(arguments, name) not in (None, 1, "", [], "rendezvous"):
                raise ValueError(f"--{name.replace('_', '-')} needs simulated ranks, and --world is {world}")
    faults = tuple(filter(None, arguments.faults.split(",")))
    for text in faults:
        fault_of(text)
    return Plan(
        program=find_program(arguments.program, tuple(arguments.arguments), is_module=arguments.is_module),
        world=world,
        world_size=arguments.ranks,
        device=arguments.device,
        seed=arguments.seed,
        schedule=arguments.schedule,
        schedules=arguments.schedules,
        semantics=arguments.semantics,
        faults=faults,
        timeline=arguments.timeline,
        own_globals=tuple(arguments.own_globals),
        cuda_as_cpu=arguments.cuda_as_cpu,
        sizes=_sizes(arguments.compare_world_sizes),
        timeout_s=arguments.timeout,
        placement=placement,
    )


def _sizes(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"(?:[1-9]\d*(?:,[1-9]\d*)+)?", text):
        raise ValueError(f"--compare-world-sizes takes two or more numbers of ranks, such as 1,2,4; got {text!r}")
    return tuple(map(int, text.split(","))) if text else ()
