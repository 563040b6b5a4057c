"""Loops over sets in which ranks communicate: each process of a cluster has its own order of the elements.

Each interpreter chooses a seed for the hashes of strings when it starts, and most objects hash by their address.
Simulated ranks share one interpreter, and therefore one order. A program passes here, and mixes up its operations on a
cluster. The iterable of a loop is read from the source of the function that posts, once for each line.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

from pdlcheck.errors import SetOrderWarning
from pdlcheck.operations.table import OPERATIONS
from pdlcheck.worlds.observe import Operation, Signature
from pdlcheck.worlds.observe.callsite import KIND_OF_FILE, short
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.schedules.access import Post

__all__ = ["SetOrder", "take_found"]

_FRAMES = 6  # the number of innermost user frames that are examined
_LOOKS = 16  # times that each call of a rank is examined in one run; more take longer and hardly find more
_POSTS = 64  # times that the callers of each communicating line of a rank are examined in one run
_NO_ORDER = frozenset(name for name, kind in OPERATIONS.items() if not kind.is_ordered)
_KEEP_ORDER = frozenset({"enumerate", "filter", "iter", "list", "map", "reversed", "tuple", "zip"})
_OF_SETS = frozenset({"copy", "difference", "intersection", "symmetric_difference", "union"})
_OPERATORS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)
_STABLE = (bool, complex, float, int)  # their hashes are the same in every process
_SETS = (set, frozenset)
_told: set[str] = set()
_found: dict[str, str] = {}  # of the runs since `take_found`: a sentence for each loop, by its line


def take_found() -> list[str]:
    """Return a sentence for each loop that was found since the last call, whether or not a warning reported it."""
    found = list(_found.values())
    _found.clear()
    return found


class _Loop(NamedTuple):
    """A loop, or a part of a comprehension."""

    line: int
    iterable: ast.expr
    names: tuple[str, ...]


class SetOrder(Observer):
    """The loops over sets that are found on the ranks of one run."""

    def __init__(self) -> None:
        self._line = ""
        self._posts: dict[tuple[int, str, str], int] = {}  # posts of each line, by rank, line and caller
        self._looks: dict[tuple[int, int, int], int] = {}  # examinations of each call, by rank, code and place
        self._elements: dict[tuple[int, int, int], Any] = {}  # of loops that are under way, by rank, frame and line

    def before_post(self, operation: Operation, post: Post) -> None:
        """Check whether a loop over a set leads to the operation that a rank is about to post."""
        signature = operation.signature
        if self._line or signature.op in _NO_ORDER:
            return
        place = signature.rank, signature.where, signature.caller
        posts = self._posts[place] = self._posts.get(place, 0) + 1
        if posts > _POSTS:
            return
        frame: FrameType | None = sys._getframe(1)
        left = _FRAMES
        while frame is not None and left:
            path = frame.f_code.co_filename
            kind = KIND_OF_FILE[path]
            if kind in ("bottom", "tests"):
                return
            if kind == "user":
                left -= 1
                loops = _loops_around(path, frame.f_lineno)
                if loops and (loop := self._loop_over_a_set(signature.rank, frame, loops)):
                    self._tell(signature, f"{short(path)}:{loop.line}", loop)
                    return
            frame = frame.f_back

    def warning(self) -> SetOrderWarning | None:
        """Return the warning, once for each loop in the life of the process; None if there is none."""
        line, self._line = self._line, ""
        return SetOrderWarning(line) if line else None

    def _tell(self, signature: Signature, where: str, loop: _Loop) -> None:
        what = (
            f"ranks post {signature.op} in the order of a set: `for {', '.join(loop.names)} in "
            f"{ast.unparse(loop.iterable)}` at {where}"
        )
        _found[where] = what
        if where in _told:
            return
        _told.add(where)
        self._line = (
            f"{what}. Simulated ranks share one order; on processes and on a cluster each rank has its own, as each "
            "process hashes strings in another way. Loop over sorted(...) or a list"
        )

    def _loop_over_a_set(self, rank: int, frame: FrameType, loops: tuple[_Loop, ...]) -> _Loop | None:
        place = rank, id(frame.f_code), frame.f_lasti
        looks = self._looks[place] = self._looks.get(place, 0) + 1
        if looks > _LOOKS:
            return None
        return next((loop for loop in loops if self._is_of_a_set(rank, frame, loop)), None)

    def _is_of_a_set(self, rank: int, frame: FrameType, loop: _Loop) -> bool:
        """Return whether the loop is past its first element, in a set whose order is not the same everywhere."""
        scope = _scope(frame)
        elements = [scope[name] for name in loop.names if name in scope]
        if all(_is_stable(one) for one in elements) or not _is_set(loop.iterable, scope):
            return False
        key = rank, id(frame), loop.line
        if key not in self._elements:
            self._elements[key] = elements
            return False
        return any(one is not other for one, other in zip(self._elements[key], elements, strict=False))


def _scope(frame: FrameType) -> Mapping[str, Any]:
    """Return the names that the frame sees.

    Up to Python 3.11, a comprehension has a frame inside that of its function.
    """
    inside = [frame.f_locals]
    if frame.f_code.co_name.startswith("<") and frame.f_back is not None:
        inside.append(frame.f_back.f_locals)
    return ChainMap(*inside, frame.f_globals)


def _is_stable(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_stable, value))
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


def _is_set(expression: ast.expr, scope: Mapping[str, Any]) -> bool:
    """Return whether the value of an expression has the order of a set. This calls no user code."""
    match expression:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Name() | ast.Attribute():
            return isinstance(_value_of(expression, scope), _SETS)
        case ast.BinOp(left=left, op=op, right=right):
            return isinstance(op, _OPERATORS) and any(_is_set(part, scope) or _is_keys(part) for part in (left, right))
        case ast.Call(func=ast.Name(id=name), args=args) if scope.get(name) in (None, getattr(builtins, name, None)):
            return name in ("set", "frozenset") or (name in _KEEP_ORDER and any(_is_set(arg, scope) for arg in args))
        case ast.Call(func=ast.Attribute(value=base, attr=name)):
            return name in _OF_SETS and _is_set(base, scope)
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
def _loops_around(path: str, line: int) -> tuple[_Loop, ...]:
    """Return the loops of a file whose bodies contain this line."""
    return tuple(loop for first, last, loop in _loops_of(path) if first <= line <= last)


@lru_cache(maxsize=256)
def _loops_of(path: str) -> tuple[tuple[int, int, _Loop], ...]:
    """Return the loops of a file that may run over a set, with the first and the last line of their bodies."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError, RecursionError):  # not a Python file, or changed since its import
        return ()
    return tuple(found for node in ast.walk(tree) for found in _loops_in(node) if _may_be_set(found[2].iterable))


def _loops_in(node: ast.AST) -> Iterator[tuple[int, int, _Loop]]:
    if isinstance(node, ast.For | ast.AsyncFor):
        yield node.body[0].lineno, node.body[-1].end_lineno or node.lineno, _loop(node.lineno, node.iter, node.target)
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for part in node.generators:
            yield node.lineno, node.end_lineno or node.lineno, _loop(node.lineno, part.iter, part.target)


def _loop(line: int, iterable: ast.expr, target: ast.expr) -> _Loop:
    names = (one.id for one in ast.walk(target) if isinstance(one, ast.Name))
    return _Loop(line, iterable, tuple(names))
