"""pytest's terminal: its reporter, its writer and its debugger."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from pdlcheck.compat.private import take, uses

__all__ = ["PdbInvoke", "TerminalReporter", "break_at", "exchange_file", "file_of"]

if TYPE_CHECKING:
    from _pytest.debugging import PdbInvoke
    from _pytest.terminal import TerminalReporter
else:
    PdbInvoke = take(
        "_pytest.debugging.PdbInvoke", "the debugger at a failure of a simulated rank", lost="--rank-pdb on sim"
    )
    TerminalReporter = take(
        "_pytest.terminal.TerminalReporter",
        "a silent reporter for plugins of a rank process that use one",
        lost="plugins on rank processes that use the terminal reporter",
    )

_pytest_pdb: Any = take("_pytest.debugging.pytestPDB", "breakpoint() on a simulated rank", lost="--rank-pdb on sim")


@uses("_pytest.debugging.pytestPDB._init_pdb", lost="breakpoint() on a simulated rank")
def break_at(frame: FrameType | None) -> None:
    """Open pytest's debugger in a frame."""
    _pytest_pdb._init_pdb("set_trace").set_trace(frame)


@uses("_pytest._io.terminalwriter.TerminalWriter._file", lost="one report of processes that a launcher has started")
def file_of(writer: Any) -> Any:
    """Return the file of a terminal writer."""
    return writer._file


def exchange_file(writer: Any, file: TextIO) -> None:
    """Replace the file of a terminal writer."""
    writer._file = file
