"""The arguments of ``pdlcheck explain``, and its exit code."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdlcheck.exit_codes import FAILED, HELD, USAGE

__all__ = ["add_explain_command", "run_explain_command"]

DESCRIPTION = """\
Say in words what a hang was:

  pdlcheck explain found.json          the verdict that `pdlcheck run --json found.json` wrote
  pdlcheck explain dumps/              the dumps of torch's Flight Recorder in a folder
  pdlcheck explain fr_trace_0 fr_trace_1

torch writes a dump for each rank when a collective times out; TORCH_FR_BUFFER_SIZE=2000 turns
the recorder on. The name of a dump ends with its rank.
"""

CODES = """\
exit code: 0 if all ranks completed the same operations, 1 if not, 2 for a file that cannot be read.
"""


def add_explain_command(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add the parser to ``commands``, the result of ``add_subparsers``."""
    parser = commands.add_parser(
        "explain",
        help="say in words what a saved verdict, or torch's Flight Recorder, shows",
        description=DESCRIPTION,
        epilog=CODES,
        formatter_class=formatter,
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="files, or a folder of dumps")


def run_explain_command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    try:
        lines, held = _explained(arguments.paths)
    except (OSError, ValueError) as error:
        words = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"pdlcheck explain: {words}", file=sys.stderr)
        return USAGE
    print("\n".join(lines))
    return HELD if held else FAILED


def _explained(paths: Sequence[Path]) -> tuple[Sequence[str], bool]:
    from pdlcheck.explanation.dumps import read_dumps
    from pdlcheck.explanation.story import story_of

    if len(paths) == 1 and paths[0].is_file() and (saved := _saved_verdict(paths[0])) is not None:
        return [str(saved["text"])], bool(saved["held"])
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    if not files:
        raise ValueError(f"there is no file in {paths[0]}")
    story = story_of(read_dumps(files))
    return story.lines, not story.hangs


def _saved_verdict(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return None
    return content if isinstance(content, dict) and content.get("kind") == "pdlcheck run" else None
