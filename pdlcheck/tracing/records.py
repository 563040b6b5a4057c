"""The records of a trace: which tensor of which module, in which direction, step and micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdlcheck.tracing.layout import Split, split_from_json, split_to_json

__all__ = ["KINDS", "Key", "Record", "record_from_json", "record_to_json"]

KINDS = ("start", "input", "forward", "backward", "gradient", "update")  # in the order in which a step has them

Key = tuple[str, str, int, int]  # kind, name, call, index: one logical tensor of a step


@dataclass(frozen=True)
class Record:
    """One tensor that a rank recorded.

    Args:
        kind: one of ``KINDS``: a parameter before the first step, an input of the model, an output of a module, the
            gradient of an output, a gradient given to the optimizer, or the change that the optimizer made.
        name: the logical name of the module or parameter.
        step: the step, from 0.
        key: the name of the tensor in the file; None for a gradient that is absent.
        order: the position in the step.
        micro_batch: the micro-batch, from 0.
        call: the call of the module in the micro-batch, from 0.
        index: the output, of several.
        splits: the part of the logical tensor.
        mesh: the ranks of the mesh of a DTensor.
        coordinates: the coordinate of the rank on each axis.
        divide: the number by which a gradient of an output is too large.
        sources: the modules whose outputs the module was called with.
        around: for an update, the root mean square and the largest value of the parameter.
    """

    kind: str
    name: str
    step: int
    key: str | None
    order: int
    micro_batch: int = 0
    call: int = 0
    index: int = 0
    splits: tuple[Split, ...] = ()
    mesh: str = ""
    coordinates: dict[str, int] = field(default_factory=dict)
    divide: int = 1
    sources: tuple[str, ...] = ()
    around: tuple[float, float] | None = None

    @property
    def logical(self) -> Key:
        """The logical tensor of the step to which this one belongs."""
        return self.kind, self.name, self.call, self.index


def record_to_json(record: Record) -> dict[str, Any]:
    """Return a record in the form of the header of a trace."""
    found = {name: value for name, value in vars(record).items() if value not in ((), {}, "", None)}
    return found | {"splits": [split_to_json(split) for split in record.splits]}


def record_from_json(found: dict[str, Any]) -> Record:
    """Return the record of a header."""
    around = found.get("around")
    return Record(
        **{
            "key": None,
            **found,
            "splits": tuple(map(split_from_json, found["splits"])),
            "sources": tuple(found.get("sources", ())),
            "around": None if around is None else (float(around[0]), float(around[1])),
        }
    )
