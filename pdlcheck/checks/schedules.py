"""A pipeline's schedule is carried out on a machine that knows nothing but what has been made so far."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdlcheck.errors import Inconclusive

__all__ = ["check_schedule"]

Rows = Sequence[Sequence[object]] | Mapping[int, Sequence[object]]
Done = tuple[int, str, int]  # stage, kind, micro-batch

# torch's words: I is the part of a backward pass that makes the gradient of the input, W that of the weights
ACTION = re.compile(r"(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|F|B|I|W)(\d+)")
OVERLAPPED = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B")
OF_PARAMETERS = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")  # of a stage that FSDP shards: no pass, no message


@dataclass(frozen=True)
class Action:
    """One cell, ``2F3`` or ``2SEND_F3``."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def partner(self) -> Action | None:
        """The receive of a send, and the send of a receive."""
        if "_" not in self.kind:
            return None
        word, kind = self.kind.split("_")
        ahead = (1 if kind == "F" else -1) * (1 if word == "SEND" else -1)
        return Action(self.stage + ahead, f"{'RECV' if word == 'SEND' else 'SEND'}_{kind}", self.microbatch)


@dataclass
class Machine:
    """What ranks have done: passes by their end, gradients by where they can be read. ``home``: ranks of stages."""

    n_stages: int
    messages: bool
    home: dict[int, int]
    done: set[Done] = field(default_factory=set)
    received: set[Done] = field(default_factory=set)

    def missing(self, action: Action) -> Done | None:
        """What ``action`` reads and nobody has made yet; None if it can go on."""
        stage, microbatch = action.stage, action.microbatch
        needs: list[Done] = []
        if action.kind == "F" and stage:
            needs = [(stage - 1, "F", microbatch)]
        elif action.kind in ("B", "I"):
            needs = [(stage, "F", microbatch)]
            if stage < self.n_stages - 1:
                needs.append((stage + 1, "B", microbatch))
        elif action.kind == "W":
            needs = [(stage, "B", microbatch)]
        elif action.kind.startswith("SEND"):
            needs = [(stage, action.kind[-1], microbatch)]
        for need in needs:
            own = self.home[need[0]] == self.home[stage] or not self.messages
            if need not in (self.done if own else self.received):
                return need
        return None

    def do(self, action: Action) -> None:
        kind = "B" if action.kind == "I" else action.kind
        if kind in ("F", "B", "W"):
            self.done.add((action.stage, kind, action.microbatch))
        elif kind.startswith("RECV"):
            ahead = -1 if kind == "RECV_F" else 1
            self.received.add((action.stage + ahead, kind[-1], action.microbatch))


def check_schedule(
    grid: Rows, *, name: str = "schedule", in_steps: bool = True, max_live: int | Sequence[int] | None = None
) -> None:
    """Every pass is done once, on one rank for a stage, after what it reads; nobody waits for ever.

    Args:
        grid: for each rank its cells, texts (or objects whose text is) such as ``1F3``: stage, F or B, micro-batch;
            None where it idles. I and W are the two halves of a backward pass. With cells such as ``1SEND_F3`` and
            ``2RECV_F3`` the messages are part of the schedule: then a send ends when its receive has been reached,
            and rows are orders. In orders, ``(1F3;2B0)OVERLAP_F_B`` is its two passes; cells that shard parameters,
            such as ``1UNSHARD``, count as idle.
        name: of the schedule, for messages.
        in_steps: cells of one column are done in the same step, and read what earlier columns made; False: each
            rank goes on as soon as it can.
        max_live: the most micro-batches that a rank may have between forward and backward pass; for all, or each.

    Raises:
        AssertionError: says what is wrong and shows the grid with the wrong cells between ``>`` and ``<``.
        Inconclusive: there are no cells.

    Example:
        >>> check_schedule([["0F0", None, None, "0B0"], [None, "1F0", "1B0", None]])
    """
    __tracebackhide__ = True
    rows = _parse(grid, name, in_steps)
    actions = [action for row in rows for action in row if action]
    if not actions:
        raise Inconclusive(f"{name}: the schedule is empty")
    messages = any("_" in action.kind for action in actions)
    n_stages = 1 + max(action.stage for action in actions)
    _require_complete(name, rows, n_stages, 1 + max(action.microbatch for action in actions))
    home = {action.stage: rank for rank, row in enumerate(rows) for action in row if action and "_" not in action.kind}
    machine = Machine(n_stages, messages, home)
    if in_steps and not messages:
        _in_steps(name, rows, machine)
    else:
        _as_orders(name, rows, machine)
    if max_live is not None:
        limits = [max_live] * len(rows) if isinstance(max_live, int) else list(max_live)
        for rank, limit in enumerate(limits):
            _require_live(name, rows, rank, limit)


def _in_steps(name: str, rows: list[list[Action | None]], machine: Machine) -> None:
    __tracebackhide__ = True
    for step in range(max(map(len, rows))):
        column = [(rank, row[step]) for rank, row in enumerate(rows) if step < len(row)]
        for rank, action in column:
            if action and (missing := machine.missing(action)):
                when = "is made in the same step" if _is_in(missing, column) else "nobody has made before"
                text = f"rank {rank} does {action} in step {step}, which reads {_show(missing)}, which {when}"
                raise _failure(name, text, rows, [(rank, step)])
        for _, action in column:
            if action:
                machine.do(action)


def _as_orders(name: str, rows: list[list[Action | None]], machine: Machine) -> None:
    __tracebackhide__ = True
    queues = [[(step, action) for step, action in enumerate(row) if action] for row in rows]
    at = [0] * len(queues)

    def current(rank: int) -> Action | None:
        return queues[rank][at[rank]][1] if at[rank] < len(queues[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(queues)):
            action = current(rank)
            if action is None or machine.missing(action):
                continue
            partner = action.partner
            if partner is None:
                machine.do(action)
                at[rank] += 1
                moved = True
                continue
            for other in range(len(queues)):
                held = current(other)
                if held == partner and not machine.missing(held):
                    for one in (action, held):
                        machine.do(one)
                    at[rank] += 1
                    at[other] += 1
                    moved = True
                    break
    stuck = [rank for rank in range(len(queues)) if current(rank)]
    if stuck:
        lines = []
        for rank in stuck:
            action = current(rank)
            assert action is not None  # it is stuck
            missing = machine.missing(action)
            lines.append(f"rank {rank} in {action} waits for {_show(missing) if missing else action.partner}")
        raise _failure(
            name,
            f"ranks wait for ever: {'; '.join(lines)}",
            rows,
            [(rank, queues[rank][at[rank]][0]) for rank in stuck],
        )


def _require_complete(name: str, rows: list[list[Action | None]], n_stages: int, n_microbatches: int) -> None:
    __tracebackhide__ = True
    seen: dict[Action, tuple[int, int]] = {}
    home: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            if action is None:
                continue
            if action in seen:
                raise _failure(name, f"{action} is done twice", rows, [seen[action], (rank, step)])
            seen[action] = rank, step
            place = home.setdefault(action.stage, (rank, step))
            if place[0] != rank:
                text = f"stage {action.stage} is on ranks {place[0]} and {rank}"
                raise _failure(name, text, rows, [place, (rank, step)])
    for stage in range(n_stages):
        for microbatch in range(n_microbatches):
            whole = Action(stage, "B", microbatch) in seen
            halves = [Action(stage, kind, microbatch) in seen for kind in "IW"]
            if Action(stage, "F", microbatch) not in seen:
                raise _failure(name, f"nobody does {stage}F{microbatch}", rows, [])
            if whole == any(halves) or (any(halves) and not all(halves) and stage):
                raise _failure(name, f"{stage}B{microbatch} is not done once, whole or in halves", rows, [])


def _require_live(name: str, rows: list[list[Action | None]], rank: int, limit: int) -> None:
    __tracebackhide__ = True
    live = 0
    for step, action in enumerate(rows[rank]):
        live += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0) if action else 0
        if live > limit:
            text = f"rank {rank} holds {live} activations from step {step} on, the limit is {limit}"
            raise _failure(name, text, rows, [(rank, step)])


def _parse(grid: Rows, name: str, in_steps: bool) -> list[list[Action | None]]:
    chosen = [grid[rank] for rank in sorted(grid)] if isinstance(grid, Mapping) else grid
    rows: list[list[Action | None]] = []
    for rank, row in enumerate(chosen):
        rows.append([])
        for step, cell in enumerate(row):
            text = "" if cell is None else str(cell).strip()
            both = OVERLAPPED.fullmatch(text)
            if both and in_steps:
                raise AssertionError(
                    f"{name}: rank {rank} has {text!r} in step {step}, two passes in one step; pass in_steps=False"
                )
            for part in both.groups() if both else (text,):
                found = ACTION.fullmatch(part)
                if not found and part not in ("", ".") and not OF_PARAMETERS.fullmatch(part):
                    raise AssertionError(
                        f"{name}: rank {rank} has {text!r} in step {step}; a cell is such as 1F3 or 1SEND_F3"
                    )
                rows[-1].append(Action(int(found[1]), found[2], int(found[3])) if found else None)
    return rows


def _is_in(done: Done, column: list[tuple[int, Action | None]]) -> bool:
    return any(
        action and (action.stage, action.kind.replace("I", "B"), action.microbatch) == done for _, action in column
    )


def _show(done: Done | None) -> str:
    return "".join(map(str, done)) if done else "nothing"


def _failure(name: str, text: str, rows: list[list[Action | None]], wrong: list[tuple[int, int]]) -> AssertionError:
    steps = max(map(len, rows))
    table = [["step", *map(str, range(steps))]]
    for rank, row in enumerate(rows):
        texts = [str(action or ".") for action in row] + ["."] * (steps - len(row))
        for at, step in wrong:
            if at == rank:
                texts[step] = f">{texts[step]}<"
        table.append([f"rank {rank}", *texts])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in table]
    return AssertionError("\n  ".join([f"{name}: {text}", *lines]))
