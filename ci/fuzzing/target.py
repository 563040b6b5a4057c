"""What is fuzzed: a reader, bytes for it, and what must hold of whatever it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis.strategies import SearchStrategy

__all__ = ["CORPUS", "NAMES", "Broken", "Target", "corpus_of", "require"]

# of all targets: the command knows them without importing torch
NAMES = ["text", "konect", "matrix-market", "metis", "npz", "parquet", "packed"]
NAMES += ["checkpoint", "checkpoint-body", "checkpoint-pickle", "checkpoint-tree"]
NAMES += ["messages", "board", "journal", "schedule", "meeting-file", "door"]
CORPUS = Path(__file__).parent / "corpus"


class Broken(Exception):
    """A reader did what it must not do; the message says what."""


@dataclass(frozen=True)
class Target:
    """A reader.

    Args:
        data: the contents of files.
        check: reads one file, raises :class:`Broken` or lets through what the reader must not raise.
        suffix: of the file.
    """

    name: str
    data: SearchStrategy[bytes]
    check: Callable[[Path], None]
    suffix: str = ""


def corpus_of(name: str) -> list[bytes]:
    """The examples of a target; found-... are not edited, but tried as they are."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir()) if not path.name.startswith("found-")]


def require(holds: bool, otherwise: str) -> None:
    """Raise :class:`Broken` unless it holds."""
    if not holds:
        raise Broken(otherwise)
