"""The search over all runs of a model of watched ranks."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from suites.meta.processes.agreement_model import Model
from suites.meta.processes.agreement_programs import Broken, Program, Tables

__all__ = ["Found", "search"]

MOST = 2_000_000


class Found(NamedTuple):
    """What a search has found: the number of states, the rows of the tables that were used."""

    states: int
    ends: int


def search(program: Program, tables: Tables | None = None) -> Found:
    """Take every step in every state that a run of the program can reach.

    Each state is visited once, however many runs lead to it.

    Raises:
        Broken: a run breaks an invariant, or reaches a state from which no run ends. Its notes are the steps of a
            shortest such run.
    """
    first = Model(program, tables or Tables())
    numbers = {first.key(): 0}
    came_from: list[tuple[int, str]] = [(0, "")]
    into: list[list[int]] = [[]]
    ends: list[int] = []
    queue = deque([first])
    number = -1
    while queue:
        model = queue.popleft()
        number += 1
        name = ""
        try:
            is_end = True
            for name, step in model.steps():
                is_end = False
                after = model.copy()
                step(after)
                after.check()
                key = after.key()
                at = numbers.setdefault(key, len(numbers))
                if at == len(into):
                    into.append([])
                    came_from.append((number, name))
                    queue.append(after)
                into[at].append(number)
            name = ""
            if is_end:
                if not model.is_over():
                    raise Broken("ranks wait for ever: no step is possible")
                model.check_end()
                ends.append(number)
        except Broken as error:
            _explain(error, came_from, number, name)
            raise
        assert len(numbers) <= MOST, f"more than {MOST} states"
    _check_way_out(into, ends, came_from)
    return Found(len(numbers), len(ends))


def _check_way_out(into: list[list[int]], ends: list[int], came_from: list[tuple[int, str]]) -> None:
    leads_to_an_end = [False] * len(into)
    todo = list(ends)
    for number in todo:
        leads_to_an_end[number] = True
    while todo:
        for before in into[todo.pop()]:
            if not leads_to_an_end[before]:
                leads_to_an_end[before] = True
                todo.append(before)
    if not all(leads_to_an_end):
        error = Broken("ranks wait for ever: no step leads out")
        _explain(error, came_from, max(n for n, leads in enumerate(leads_to_an_end) if not leads), "")
        raise error


def _explain(error: Broken, came_from: list[tuple[int, str]], number: int, last: str) -> None:
    run = [last] if last else []
    while number:
        number, name = came_from[number]
        run.append(name)
    for name in reversed(run):
        error.add_note(name)
