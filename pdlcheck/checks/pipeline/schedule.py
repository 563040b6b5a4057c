"""The check of a pipeline's schedule: a machine executes each action only after its inputs exist."""

from __future__ import annotations

from collections.abc import Sequence

from pdlcheck.checks.pipeline.schedule_grid import Action, Grid, Place, Rows, parse
from pdlcheck.checks.pipeline.schedule_passes import faults_of
from pdlcheck.errors import CheckFailed, Inconclusive

__all__ = ["check_schedule"]

SHOWN = 3


class Machine:
    """The state of a schedule's execution: the actions that are done. Every action of the grid occurs once."""

    def __init__(self, grid: Grid) -> None:
        self.place: dict[Action, Place] = dict(grid)
        self.home = {stage: counts[0][0] for stage, counts in grid.homes.items()}
        self.messages = any(action.is_message for action in self.place)
        self.done: set[Action] = set()

    def missing(self, action: Action) -> Action | None:
        """Return an input of ``action`` that no rank has made yet, or None if ``action`` can run."""
        return next((need for need in self._needs(action) if need not in self.done), None)

    def _needs(self, action: Action) -> list[Action]:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        forward, backward = Action(stage, "F", microbatch), self._backward(stage, microbatch)
        if kind in ("SEND_F", "SEND_B"):
            return [forward if kind == "SEND_F" else backward]
        if kind in ("RECV_F", "RECV_B"):
            return []
        if kind == "F":
            return [self._from(action, Action(stage - 1, "F", microbatch))] if stage else []
        if kind == "W" and backward.kind == "I":
            return [backward]
        last = stage + 1 not in self.home
        return [forward] if last else [forward, self._from(action, self._backward(stage + 1, microbatch))]

    def _backward(self, stage: int, microbatch: int) -> Action:
        """Return the pass that makes the gradient of the stage's input."""
        half = Action(stage, "I", microbatch)
        return half if half in self.place else Action(stage, "B", microbatch)

    def _from(self, action: Action, made: Action) -> Action:
        """Return the source of ``made`` for ``action``: the pass itself, or the message that brings it."""
        if not self.messages or self.home[made.stage] == self.home[action.stage]:
            return made
        return Action(action.stage, "RECV_F" if made.kind == "F" else "RECV_B", action.microbatch)


def check_schedule(
    grid: Rows, *, name: str = "schedule", in_steps: bool = True, max_live: int | Sequence[int] | None = None
) -> None:
    """Check that every pass is done once, on one rank for each stage, after its inputs, and without a deadlock.

    Args:
        grid: for each rank its cells. A cell is a text (or an object whose text is) such as ``1F3``: stage, F or B,
            micro-batch; None is an idle step. I and W are the two halves of a backward pass: the gradient of the input,
            which stage 0 may leave out, and that of the weights. With cells such as ``1SEND_F3`` and ``2RECV_F3`` the
            messages are part of the schedule. Then a send ends when its receive has been reached, and rows are orders.
            In orders, ``(1F3;2B0)OVERLAP_F_B`` is its two passes. Cells that shard parameters, such as ``1UNSHARD``,
            count as idle.
        name: the name of the schedule, for messages.
        in_steps: True: cells of one column run in the same step, and read the results of earlier columns. False: each
            rank proceeds as soon as it can.
        max_live: the largest number of micro-batches that a rank may have between forward and backward pass; one number
            for all ranks, or one for each.

    Raises:
        AssertionError: describes the fault and shows the grid with the wrong cells between ``>`` and ``<``.
        Inconclusive: there are no cells.
        ValueError: ``max_live`` has another number of ranks than the grid.

    Example:
        >>> check_schedule([["0F0", None, None, "0B0"], [None, "1F0", "1B0", None]])
    """
    __tracebackhide__ = True
    read = parse(grid, name, in_steps)
    if not read.places:
        raise Inconclusive(f"{name}: the schedule is empty")
    if faults := faults_of(read):
        texts = [fault.text for fault in faults[:SHOWN]]
        more = f"; {len(faults) - SHOWN} more" if faults[SHOWN:] else ""
        raise read.failure("; ".join(texts) + more, [place for fault in faults[:SHOWN] for place in fault.places])
    machine = Machine(read)
    if in_steps and not machine.messages:
        _in_steps(read, machine)
    else:
        _as_orders(read, machine)
    if max_live is not None:
        limits = [max_live] * len(read.rows) if isinstance(max_live, int) else list(max_live)
        if len(limits) != len(read.rows):
            raise ValueError(f"{name}: max_live has {len(limits)} numbers, the schedule {len(read.rows)} ranks")
        for rank, limit in enumerate(limits):
            _require_live(read, rank, limit)


def _in_steps(grid: Grid, machine: Machine) -> None:
    __tracebackhide__ = True
    for step in range(max(map(len, grid.rows))):
        column = [(rank, row[step]) for rank, row in enumerate(grid.rows) if step < len(row)]
        for rank, cell in column:
            for action in cell:
                if missing := machine.missing(action):
                    maker, made = machine.place[missing]
                    when = f"in step {made}" if made > step else "in the same step"
                    text = f"rank {rank} does {action} in step {step}, which reads {missing}, which rank {maker} does"
                    hint = "" if _waits(grid, Machine(grid)) else "; as orders the rows can be done: in_steps=False"
                    raise grid.failure(f"{text} {when}{hint}", [(rank, step), (maker, made)])
        machine.done.update(action for _, cell in column for action in cell)


def _as_orders(grid: Grid, machine: Machine) -> None:
    __tracebackhide__ = True
    if waits := _waits(grid, machine):
        raise _stuck(grid, machine, waits)


def _waits(grid: Grid, machine: Machine) -> dict[int, tuple[Action, Action]]:
    """Run every rank until none can proceed.

    Return, for each unfinished rank, its current action and the action that it waits for.
    """
    queues = [[action for cell in row for action in cell] for row in grid.rows]
    at = [0] * len(queues)

    def current(rank: int) -> Action | None:
        return queues[rank][at[rank]] if at[rank] < len(queues[rank]) else None

    def can_end(action: Action) -> bool:
        is_reached = action in machine.place and current(machine.place[action][0]) == action
        return is_reached and not machine.missing(action)

    moved = True
    while moved:
        moved = False
        for rank in range(len(queues)):
            while action := current(rank):
                ends = [action, action.partner] if action.partner else [action]  # both ends of a message at once
                if not all(map(can_end, ends)):
                    break
                for end in ends:
                    machine.done.add(end)
                    at[machine.place[end][0]] += 1
                moved = True
    waits = {}
    for rank in range(len(queues)):
        if action := current(rank):
            awaited = machine.missing(action) or action.partner
            assert awaited is not None  # otherwise the rank would have proceeded
            waits[rank] = action, awaited
    return waits


def _stuck(grid: Grid, machine: Machine, waits: dict[int, tuple[Action, Action]]) -> CheckFailed:
    """Return an error that names the ranks that cause the deadlock, and lists the ranks that wait for them.

    A rank is a cause if it waits for itself, if it is in a cycle, or if no rank does the action that it waits for.
    """

    def next_one(rank: int) -> int | None:
        awaited = waits[rank][1]
        return machine.place[awaited][0] if awaited in machine.place else None

    def is_cause(rank: int) -> bool:
        seen, other = {rank}, next_one(rank)
        while other is not None and other not in seen:
            seen.add(other)
            other = next_one(other)
        return other == rank or next_one(rank) is None

    causes = [rank for rank in waits if is_cause(rank)]
    lines = []
    for rank in causes:
        action, awaited = waits[rank]
        where = "nobody does it"
        if awaited in machine.place:
            other, step = machine.place[awaited]
            where = f"rank {other}{' itself' if other == rank else ''}, step {step}"
        lines.append(f"rank {rank} in {action} (step {machine.place[action][1]}) waits for {awaited} ({where})")
    others = [str(rank) for rank in waits if rank not in causes]
    if others:
        lines.append(f"rank{'s' if others[1:] else ''} {', '.join(others)} wait{'' if others[1:] else 's'} for them")
    return grid.failure(f"ranks wait for ever: {'; '.join(lines)}", [machine.place[waits[rank][0]] for rank in causes])


def _require_live(grid: Grid, rank: int, limit: int) -> None:
    __tracebackhide__ = True
    live = 0
    for step, cell in enumerate(grid.rows[rank]):
        for action in cell:
            live += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            if live > limit:
                text = f"rank {rank} holds {live} activations from {action} in step {step} on, the limit is {limit}"
                raise grid.failure(text, [(rank, step)])
