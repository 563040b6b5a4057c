"""What each rank of a program does."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from pdlcheck.compat.patches import Patch, Patches
from pdlcheck.scripts.counts import Counts, counted
from pdlcheck.scripts.lines import Lines, own_lines
from pdlcheck.scripts.program import Program, ProgramExit
from pdlcheck.scripts.saved import SAVES, kept_saves
from pdlcheck.worlds.exceptions import add_note
from pdlcheck.worlds.program import own_program

__all__ = ["call_on_rank", "import_and_call", "run_on_rank", "simulated_output"]

_NO_INPUT = "ranks have no standard input; give the program its values as arguments, or in a file"

_lines: Lines | None = None  # where simulated ranks write


def run_on_rank(program: Program, keeps: bool = False) -> Counts:
    """Run the program in the calling rank, and return what the rank has done.

    Args:
        program: the program.
        keeps: whether to keep the tensors that it saves.

    Raises:
        ProgramExit: the program ended with an exit code other than 0.
        Exception: whatever the program raised.
    """
    with _program(program) as counts:
        if keeps:
            with nullcontext() if _lines is not None else SAVES, kept_saves() as counts.saved:
                program.run()
        else:
            program.run()
    return counts


def import_and_call(program: Program, calls: Sequence[bytes]) -> Counts:
    """Import the program in the calling rank as a spawned process does, and call the function of this rank."""
    with _program(program) as counts:
        program.import_anew()
        function, arguments, options = pickle.loads(calls[counts.rank])
        function(*arguments, **options)
    return counts


def call_on_rank(calls: Sequence[tuple[Any, Any, Any]]) -> Counts:
    """Call the function of the calling rank as a forked process does, with what the program has imported."""
    rank = int(os.environ["RANK"])
    with _output(rank), counted(rank) as counts, _exits(rank):
        function, arguments, options = calls[rank]
        function(*arguments, **options)
    return counts


@contextmanager
def _program(program: Program) -> Iterator[Counts]:
    rank = int(os.environ["RANK"])
    with own_program(), _output(rank), counted(rank) as counts, _exits(rank):
        program.prepare()
        yield counts


@contextmanager
def _exits(rank: int) -> Iterator[None]:
    try:
        yield
    except SystemExit as exit_:
        _check_exit(rank, exit_)
    except EOFError as error:
        add_note(error, _NO_INPUT)
        raise


def _check_exit(rank: int, exit_: SystemExit) -> None:
    code = exit_.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    if code:
        failed = ProgramExit(f"the program ended with exit code {code}", rank=rank, code=code)
        raise failed.with_traceback(exit_.__traceback__) from None


@contextmanager
def _output(rank: int) -> Iterator[None]:
    if _lines is None:
        yield
    else:
        with own_lines(_lines, rank):
            yield


@contextmanager
def simulated_output(lines: Lines) -> Iterator[None]:
    """Give what simulated ranks print to ``lines``, and no input to them. An exit ends one rank, not this process."""
    global _lines
    stdin = sys.stdin
    with Patches([Patch(os, "_exit", _exit_of_rank, "the process is that of all simulated ranks")]), SAVES:
        _lines = lines
        try:
            with open(os.devnull) as nothing:
                sys.stdin = nothing
                yield
        finally:
            sys.stdin = stdin
            _lines = None


def _exit_of_rank(real: Callable[[int], Any]) -> Callable[[int], Any]:
    process = os.getpid()

    def exit_(status: int) -> Any:
        if os.getpid() != process:  # a worker of a DataLoader
            real(status)
        raise SystemExit(status)

    return exit_
