"""The statements of a program that decide whether a line runs: conditions, loops, handlers and early exits."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Decision", "decisions_of", "function_of", "source_of"]

_LONGEST = 80  # characters of a statement in a message
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class Decision(NamedTuple):
    """A statement that decides whether a line runs.

    Args:
        line: the line of the statement.
        side: the part of the statement that the line belongs to, such as ``else``.
        is_loop: True if the line is in the body of a loop.
    """

    line: int
    side: str
    is_loop: bool = False


def function_of(where: str) -> tuple[str, int] | None:
    """Return the file and the first line of the innermost function around ``train.py:12``; None without source."""
    path, line = _parse(where)
    scope = _scope(path, line)
    return (path, scope[0]) if scope else None


def decisions_of(where: str) -> list[Decision]:
    """Return the statements of its function that decide whether the line ``train.py:12`` runs, the outermost first."""
    path, line = _parse(where)
    scope = _scope(path, line)
    return list(_decisions(scope[1], line)) if scope else []


def source_of(where: str, line: int) -> str:
    """Return a line of the file of ``where``, shortened."""
    text = linecache.getline(_parse(where)[0], line).strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _parse(where: str) -> tuple[str, int]:
    path, _, line = where.rpartition(":")
    return (os.path.abspath(path), int(line)) if path and line.isdigit() else ("", 0)


def _scope(path: str, line: int) -> tuple[int, Sequence[ast.stmt]] | None:
    """Return the first line and the statements of the innermost function around a line; None if there is no source."""
    around = [scope for scope in _scopes(path) if line in _lines(scope[1])] if path else []
    return max(around, key=lambda scope: scope[0], default=None)


@lru_cache(maxsize=64)
def _scopes(path: str) -> tuple[tuple[int, Sequence[ast.stmt]], ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ()
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    return (0, tree.body), *((function.lineno, function.body) for function in functions)


def _decisions(body: Sequence[ast.stmt], line: int) -> Iterator[Decision]:
    for number, statement in enumerate(body):
        if line in _lines([statement]):
            yield from _exits(body[:number])
            yield from _inside(statement, line)


def _exits(earlier: Sequence[ast.stmt]) -> Iterator[Decision]:
    """Yield the conditions after which the rest of their block does not run."""
    for one in earlier:
        if isinstance(one, ast.If) and _leaves(one.body) != _leaves(one.orelse):
            yield Decision(one.lineno, "else" if _leaves(one.body) else "if")


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], _EXITS)


def _inside(statement: ast.stmt, line: int) -> Iterator[Decision]:
    for decision, body in _parts(statement):
        if line in _lines(body):
            if decision is not None:
                yield decision
            yield from _decisions(body, line)
            return  # a line of its own may hold several parts: `if rank: x()`


def _parts(statement: ast.stmt) -> Iterator[tuple[Decision | None, Sequence[ast.stmt]]]:
    """Yield the blocks of a statement, each with the decision that it depends on."""
    at = statement.lineno
    if isinstance(statement, ast.If):
        yield Decision(at, "if"), statement.body
        yield Decision(at, "else"), statement.orelse
    elif isinstance(statement, _LOOPS):
        yield Decision(at, "loop", is_loop=True), statement.body
        yield Decision(at, "else"), statement.orelse
    elif isinstance(statement, ast.Match):
        for number, case in enumerate(statement.cases):
            yield Decision(at, f"case {number}"), case.body
    elif isinstance(statement, ast.Try):
        for handler in statement.handlers:
            yield Decision(handler.lineno, "except"), handler.body
        for block in (statement.body, statement.orelse, statement.finalbody):
            yield None, block
    elif isinstance(statement, ast.With | ast.AsyncWith | ast.ClassDef):
        yield None, statement.body


def _lines(body: Sequence[ast.stmt]) -> range:
    return range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1) if body else range(0)
