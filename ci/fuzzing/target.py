"""A fuzz target: a reader, bytes for it, and the requirements on its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis.strategies import SearchStrategy

__all__ = ["CORPUS", "NAMES", "Broken", "Target", "corpus_of", "require"]

# names of all targets: the command uses them without importing torch
NAMES = ["text", "konect", "matrix-market", "metis", "npz", "parquet", "packed"]
NAMES += ["checkpoint", "checkpoint-body", "checkpoint-pickle", "checkpoint-tree"]
NAMES += ["messages", "board", "journal", "schedule", "meeting-file", "door"]
CORPUS = Path(__file__).parent / "corpus"


class Broken(Exception):
    """Raised when a reader violates a requirement; the message describes the violation."""


@dataclass(frozen=True)
class Target:
    """A reader to fuzz.

    Args:
        name: of the target and of its folder in the corpus.
        data: the contents of files.
        check: reads one file; raises :class:`Broken`, or does not catch an error that the reader must not raise.
        suffix: suffix of the file name.
    """

    name: str
    data: SearchStrategy[bytes]
    check: Callable[[Path], None]
    suffix: str = ""


def corpus_of(name: str) -> list[bytes]:
    """Return the examples of a target, except the files found-..., which are tried without edits."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir()) if not path.name.startswith("found-")]


def require(holds: bool, otherwise: str) -> None:
    """Raise :class:`Broken` if the condition does not hold."""
    if not holds:
        raise Broken(otherwise)
