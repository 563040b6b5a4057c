"""Loops over sets, read from the source of the functions that are running.

The iterable of a loop is read once for each line. No user code is called to find its value.
"""

from __future__ import annotations

import ast
import builtins
import linecache
from collections import ChainMap
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

from pdlcheck.operations.signature import Signature
from pdlcheck.operations.table import OPERATIONS
from pdlcheck.worlds.observe.callsite import KIND_OF_FILE, short

__all__ = ["NO_ORDER", "Loop", "is_set", "is_stable", "loop_of_post", "loops_around", "scope_of", "user_frames"]

NO_ORDER = frozenset(name for name, kind in OPERATIONS.items() if not kind.is_ordered)
_FRAMES = 6  # the number of innermost user frames that are examined
_KEEP_ORDER = frozenset({"enumerate", "filter", "iter", "list", "map", "reversed", "tuple", "zip"})
_OF_SETS = frozenset({"copy", "difference", "intersection", "symmetric_difference", "union"})
_OPERATORS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)
_STABLE = (bool, complex, float, int)  # their hashes are the same in every process
_SETS = (set, frozenset)


class Loop(NamedTuple):
    """A loop, or a part of a comprehension."""

    line: int
    iterable: ast.expr
    names: tuple[str, ...]

    def at(self, path: str) -> str:
        """Return the loop in words; it is in the file ``path``."""
        return f"`for {', '.join(self.names)} in {ast.unparse(self.iterable)}` at {short(path)}:{self.line}"


def user_frames(frame: FrameType | None) -> Iterator[tuple[FrameType, str]]:
    """Yield the innermost frames of the user's code, from ``frame`` outwards, with their files."""
    left = _FRAMES
    while frame is not None and left:
        path = frame.f_code.co_filename
        kind = KIND_OF_FILE[path]
        if kind in ("bottom", "tests"):
            return
        if kind == "user":
            left -= 1
            yield frame, path
        frame = frame.f_back


def loop_of_post(signature: Signature, frame: FrameType | None) -> str:
    """Return the loop over a set, in words, in which the caller has just posted an operation; empty if there is none.

    A loop over numbers does not count, because all processes iterate over them in one order.
    """
    if signature.op in NO_ORDER:
        return ""
    frames = [(one, path, f"{short(path)}:{one.f_lineno}") for one, path in user_frames(frame)]
    if signature.where not in (where for *_, where in frames):  # it was posted elsewhere, and is awaited here
        return ""
    for one, path, _ in frames:
        scope = scope_of(one)
        for loop in loops_around(path, one.f_lineno):
            elements = [scope[name] for name in loop.names if name in scope]
            if not all(is_stable(element) for element in elements) and is_set(loop.iterable, scope):
                return loop.at(path)
    return ""


def scope_of(frame: FrameType) -> Mapping[str, Any]:
    """Return the names that the frame sees.

    Up to Python 3.11, a comprehension has a frame inside that of its function.
    """
    inside = [frame.f_locals]
    if frame.f_code.co_name.startswith("<") and frame.f_back is not None:
        inside.append(frame.f_back.f_locals)
    return ChainMap(*inside, frame.f_globals)


def is_stable(value: Any) -> bool:
    """Return whether the hash of a value is the same in every process."""
    if type(value) is tuple:
        return all(map(is_stable, value))
    return isinstance(value, _STABLE)


def _may_be_set(expression: ast.expr) -> bool:
    """Return whether an expression of this form can be a set. Most loops are over a range, or the result of a call."""
    match expression:
        case ast.Set() | ast.SetComp() | ast.Name() | ast.Attribute() | ast.BinOp():
            return True
        case ast.Call(func=ast.Name(id=name), args=args):
            return name in ("set", "frozenset") or (name in _KEEP_ORDER and any(map(_may_be_set, args)))
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in _OF_SETS
    return False


def is_set(expression: ast.expr, scope: Mapping[str, Any]) -> bool:
    """Return whether the value of an expression has the order of a set. This calls no user code."""
    match expression:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Name() | ast.Attribute():
            return isinstance(_value_of(expression, scope), _SETS)
        case ast.BinOp(left=left, op=op, right=right):
            return isinstance(op, _OPERATORS) and any(is_set(part, scope) or _is_keys(part) for part in (left, right))
        case ast.Call(func=ast.Name(id=name), args=args) if scope.get(name) in (None, getattr(builtins, name, None)):
            return name in ("set", "frozenset") or (name in _KEEP_ORDER and any(is_set(arg, scope) for arg in args))
        case ast.Call(func=ast.Attribute(value=base, attr=name)):
            return name in _OF_SETS and is_set(base, scope)
    return False


def _is_keys(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Call) and getattr(expression.func, "attr", "") == "keys"


def _value_of(expression: ast.expr, scope: Mapping[str, Any]) -> Any:
    """Return the value of a name, or of an attribute that an object or a class holds; None if it must be computed."""
    if isinstance(expression, ast.Name):
        return scope.get(expression.id)
    if isinstance(expression, ast.Attribute):
        owner = _value_of(expression.value, scope)
        held = (vars(one) for one in (owner, *type(owner).__mro__) if hasattr(one, "__dict__"))
        return next((names[expression.attr] for names in held if expression.attr in names), None)
    return None


@lru_cache(maxsize=4096)
def loops_around(path: str, line: int) -> tuple[Loop, ...]:
    """Return the loops of a file whose bodies contain this line."""
    return tuple(loop for first, last, loop in _loops_of(path) if first <= line <= last)


@lru_cache(maxsize=256)
def _loops_of(path: str) -> tuple[tuple[int, int, Loop], ...]:
    """Return the loops of a file that may run over a set, with the first and the last line of their bodies."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError, RecursionError):  # not a Python file, or changed since its import
        return ()
    return tuple(found for node in ast.walk(tree) for found in _loops_in(node) if _may_be_set(found[2].iterable))


def _loops_in(node: ast.AST) -> Iterator[tuple[int, int, Loop]]:
    if isinstance(node, ast.For | ast.AsyncFor):
        yield node.body[0].lineno, node.body[-1].end_lineno or node.lineno, _loop(node.lineno, node.iter, node.target)
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for part in node.generators:
            yield node.lineno, node.end_lineno or node.lineno, _loop(node.lineno, part.iter, part.target)


def _loop(line: int, iterable: ast.expr, target: ast.expr) -> Loop:
    names = (one.id for one in ast.walk(target) if isinstance(one, ast.Name))
    return Loop(line, iterable, tuple(names))
