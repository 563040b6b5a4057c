"""A correct schedule in which one cell is broken is rejected, and the message names the cell and its place."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlcheck.checks import check_schedule

some = settings(max_examples=30)

CELL = re.compile(r"(\d+)([A-Z_]+)(\d+)")
DOES = re.compile(r"rank (\d+) (?:does|in) (\w+) (?:in step |\(step )(\d+)")
WAITS = re.compile(r"(?:waits for|which reads) (\w+)(?: \(|, which )rank (\d+)(?: itself,| does in|,) step (\d+)")
LACKS = re.compile(r"on rank (\d+) \((\w+) is(?: on rank (\d+))? in step (\d+)\)")

READERS = {
    "F": ("B", "I", "W", "SEND_F"),
    "B": ("SEND_B",),
    "I": ("W", "SEND_B"),
    "RECV_F": ("F",),
    "RECV_B": ("B", "I"),
}


@dataclass(frozen=True)
class Drawn:
    rows: list[list[str | None]]
    in_steps: bool

    @property
    def cells(self):
        """Return the rank and the step of every cell."""
        return {cell: (rank, step) for rank, row in enumerate(self.rows) for step, cell in enumerate(row) if cell}


def reads(stage, kind, i, kinds):
    """Return the passes that a pass reads; ``kinds`` holds the letters of each stage and micro-batch."""
    if kind == "F":
        return {(stage - 1, "F", i)} if stage else set()
    if kind == "W" and "I" in kinds[stage, i]:
        return {(stage, "I", i)}
    after = {(stage + 1, "I" if "I" in kinds[stage + 1, i] else "B", i)} if (stage + 1, i) in kinds else set()
    return {(stage, "F", i)} | after


@st.composite
def schedules(draw, forms=("steps", "orders", "messages")):
    """Draw stages on any ranks, with whole or halved backward passes, in any order that can run."""
    n_stages, n_microbatches, n_ranks = (draw(st.integers(1, most)) for most in (4, 3, 3))
    home = [draw(st.integers(0, n_ranks - 1)) for _ in range(n_stages)]
    kinds = {
        (stage, i): draw(st.sampled_from(["FB", "FIW"] if stage else ["FB", "FIW", "FW"]))
        for stage in range(n_stages)
        for i in range(n_microbatches)
    }
    left = [(stage, kind, i) for (stage, i), letters in kinds.items() for kind in letters]
    form, rows, made = draw(st.sampled_from(forms)), [[] for _ in range(n_ranks)], {}
    while left:
        stage, kind, i = one = draw(st.sampled_from([one for one in left if reads(*one, kinds) <= set(made)]))
        left.remove(one)
        row = rows[home[stage]]
        if form == "steps":
            row += [None] * (max((made[other] + 1 for other in reads(*one, kinds)), default=0) - len(row))
        made[one] = len(row)
        row.append(f"{stage}{kind}{i}")
        letter, other = ("F", stage + 1) if kind == "F" else ("B", stage - 1)
        if form == "messages" and kind != "W" and 0 <= other < n_stages and home[other] != home[stage]:
            row.append(f"{stage}SEND_{letter}{i}")
            rows[home[other]].append(f"{other}RECV_{letter}{i}")
    return Drawn(rows, form == "steps")


def drop(draw, drawn, rows):
    """Drop a cell, except the gradient of the model's input, which no pass reads."""
    cell = draw(st.sampled_from([cell for cell in drawn.cells if not cell.startswith("0I")]))
    rank, step = drawn.cells[cell]
    rows[rank][step] = None
    stage, kind, microbatch = CELL.fullmatch(cell).groups()
    is_all = kind in "BW" and f"{stage}I{microbatch}" not in drawn.cells  # the other cells fit both B and W
    return {f"{stage}{one}{microbatch}" for one in "BW"} if is_all else {cell}


def repeat(draw, drawn, rows):
    cell = draw(st.sampled_from([*drawn.cells]))
    rows[draw(st.integers(0, len(rows) - 1))].append(cell)
    return {cell}


def move(draw, drawn, rows):
    """Move a cell to another rank, which may be a new one."""
    cell = draw(st.sampled_from([*drawn.cells]))
    rank, step = drawn.cells[cell]
    rows[rank][step] = None
    rows.append([])
    draw(st.sampled_from([row for other, row in enumerate(rows) if other != rank])).append(cell)
    return {cell}


def renumber(draw, drawn, rows):
    """Give a cell the number of another stage or micro-batch."""
    cell, changed = draw(st.sampled_from([*drawn.cells])), draw(st.sampled_from([0, 2]))
    parts = [*CELL.fullmatch(cell).groups()]
    parts[changed] = draw(st.sampled_from("0123456789".replace(parts[changed], "")))
    other = "".join(parts)
    rank, step = drawn.cells[cell]
    rows[rank][step] = other
    return {cell, other}


def swap(draw, drawn, rows):
    """Swap a cell with one that reads its result."""
    parsed = [CELL.fullmatch(cell).groups() for cell in drawn.cells]
    pairs = [(f"{s}{kind}{i}", f"{s}{reader}{i}") for s, kind, i in parsed for reader in READERS.get(kind, ())]
    first, second = draw(st.sampled_from([pair for pair in pairs if pair[1] in drawn.cells]))
    (rank, one), (_, other) = drawn.cells[first], drawn.cells[second]
    rows[rank][one], rows[rank][other] = second, first
    return {first, second}


def untrue(headline, rows):
    """Return the places that the message names although another cell is there."""
    found = [(int(rank), int(step), cell) for rank, cell, step in DOES.findall(headline)]
    found += [(int(rank), int(step), cell) for cell, rank, step in WAITS.findall(headline)]
    found += [(int(other or rank), int(step), cell) for rank, cell, other, step in LACKS.findall(headline)]
    return [(rank, step, cell) for rank, step, cell in found if rows[rank][step] != cell]


@some
@given(drawn=schedules())
def test_what_can_be_carried_out_is_accepted(drawn):
    check_schedule(drawn.rows, in_steps=drawn.in_steps)


@pytest.mark.parametrize("mutate", [drop, repeat, move, renumber, swap])
@some
@given(data=st.data(), drawn=schedules())
def test_a_spoilt_cell_is_named(mutate, data, drawn):
    rows = [list(row) for row in drawn.rows]
    spoilt = mutate(data.draw, drawn, rows)
    with pytest.raises(AssertionError) as error:
        check_schedule(rows, in_steps=drawn.in_steps)
    headline = str(error.value).splitlines()[0]
    assert spoilt & set(re.findall(r"\d+[A-Z_]+\d+", headline))
    assert not untrue(headline, rows)


@some
@given(drawn=schedules(forms=("steps", "orders")))
def test_the_cell_that_holds_one_activation_too_many_is_named(drawn):
    peaks, steps = [], []
    for row in drawn.rows:
        live = [
            sum({"F": 1, "B": -1, "W": -1}.get(CELL.fullmatch(cell)[2], 0) for cell in row[: i + 1] if cell)
            for i in range(len(row))
        ]
        peaks.append(max(live, default=0))
        steps.append(live.index(peaks[-1]) if live else 0)
    check_schedule(drawn.rows, in_steps=drawn.in_steps, max_live=peaks)
    rank = peaks.index(max(peaks))
    text = f"rank {rank} holds {peaks[rank]} activations from {drawn.rows[rank][steps[rank]]} in step {steps[rank]} on"
    limits = [peak - (one == rank) for one, peak in enumerate(peaks)]
    with pytest.raises(AssertionError, match=f"{text}, the limit is {peaks[rank] - 1}"):
        check_schedule(drawn.rows, in_steps=drawn.in_steps, max_live=limits)
