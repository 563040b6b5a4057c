"""The cells of a schedule, their places, and the grid that messages show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pdlcheck.errors import CheckFailed

__all__ = ["Action", "Grid", "Place", "Rows", "parse"]

Rows = Sequence[Sequence[object]] | Mapping[int, Sequence[object]]
Place = tuple[int, int]  # rank, step

# The letters are torch's. I is the part of a backward pass that makes the gradient of the input. W makes that of the
# weights.
ACTION = re.compile(r"(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|F|B|I|W)(\d+)")
OVERLAPPED = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B")
OF_PARAMETERS = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")  # cells of an FSDP stage that are no pass or message


@dataclass(frozen=True)
class Action:
    """A pass, ``2F3``, or a message, ``2SEND_F3``."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        """Return the action in the notation of torch, such as ``1F3``."""
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def is_message(self) -> bool:
        """Return whether the action is a send or a receive."""
        return "_" in self.kind

    @property
    def partner(self) -> Action | None:
        """Return the receive of a send, or the send of a receive; None for a pass."""
        if not self.is_message:
            return None
        word, kind = self.kind.split("_")
        ahead = (1 if kind == "F" else -1) * (1 if word == "SEND" else -1)
        return Action(self.stage + ahead, f"{'RECV' if word == 'SEND' else 'SEND'}_{kind}", self.microbatch)


@dataclass(frozen=True)
class Grid:
    """The actions of each rank in each step: none, one action, or two passes that overlap."""

    name: str
    rows: list[list[tuple[Action, ...]]]

    def __iter__(self) -> Iterator[tuple[Action, Place]]:
        """Yield every action and its place, rank by rank, in the order of each rank."""
        for rank, row in enumerate(self.rows):
            for step, cell in enumerate(row):
                for action in cell:
                    yield action, (rank, step)

    @cached_property
    def places(self) -> dict[Action, list[Place]]:
        """Return the places of each action. An action with more than one place is a fault."""
        found: dict[Action, list[Place]] = {}
        for action, place in self:
            found.setdefault(action, []).append(place)
        return found

    @cached_property
    def homes(self) -> dict[int, list[tuple[int, int]]]:
        """Return, for each stage, the ranks that do passes of it and their numbers of passes, largest first."""
        counts: dict[int, Counter[int]] = {}
        for action, (rank, _) in self:
            if not action.is_message:
                counts.setdefault(action.stage, Counter())[rank] += 1
        return {stage: ranks.most_common() for stage, ranks in counts.items()}

    @cached_property
    def kinds(self) -> set[str]:
        """Return the kinds of all actions."""
        return {action.kind for action in self.places}

    def failure(self, text: str, wrong: Sequence[Place]) -> CheckFailed:
        """Return an error that shows the grid, with the cells at ``wrong`` between ``>`` and ``<``."""
        steps = max(map(len, self.rows))
        table = [["step", *map(str, range(steps))]]
        for rank, row in enumerate(self.rows):
            texts = [";".join(map(str, cell)) or "." for cell in row] + ["."] * (steps - len(row))
            marked = [f">{one}<" if (rank, step) in wrong else one for step, one in enumerate(texts)]
            table.append([f"rank {rank}", *marked])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in table]
        return CheckFailed("\n  ".join([f"{self.name}: {text}", *lines]), subject=self.name)


def parse(rows: Rows, name: str, in_steps: bool) -> Grid:
    """Parse the cells, which are texts or objects whose text is a cell. A rank that a mapping leaves out is idle."""
    if isinstance(rows, Mapping):
        rows = [rows.get(rank, []) for rank in range(1 + max(rows, default=-1))]
    read: list[list[tuple[Action, ...]]] = []
    for rank, row in enumerate(rows):
        read.append([_actions(cell, f"{name}: rank {rank}", step, in_steps) for step, cell in enumerate(row)])
    return Grid(name, read)


def _actions(cell: object, who: str, step: int, in_steps: bool) -> tuple[Action, ...]:
    text = "" if cell is None else str(cell).strip()
    if text in ("", ".") or OF_PARAMETERS.fullmatch(text):
        return ()
    both = OVERLAPPED.fullmatch(text)
    if both and in_steps:
        raise CheckFailed(f"{who} has {text!r} in step {step}, two passes in one step; pass in_steps=False")
    found = [ACTION.fullmatch(part) for part in (both.groups() if both else (text,))]
    actions = tuple(Action(int(one[1]), one[2], int(one[3])) for one in found if one)
    if not actions:
        raise CheckFailed(f"{who} has {text!r} in step {step}; a cell is such as 1F3 or 1SEND_F3")
    return actions
