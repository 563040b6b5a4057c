"""The conditions on the rank in a program: their two branches are one place that all ranks reach.

A condition is on the rank if it mentions the rank, or anything that the file derives from it: ``me = rank``, or a
method that returns ``self.owner == dist.get_rank()``.
"""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pdlcheck.operations.signature import Name

__all__ = ["are_branches_on_rank"]


_Word = tuple[range, str]  # the lines in which a word has one meaning, and the word

_FILE = range(1 << 30)  # the lines of code outside functions


class _Choice(NamedTuple):
    """One condition on the rank: the lines of its function, the lines of its branches, and the names in each branch."""

    around: range
    lines: tuple[range, range]
    names: tuple[frozenset[str], frozenset[str]]


def are_branches_on_rank(one: Name, other: Name) -> bool:
    """Return whether the rank decides which of two tensors a call gets.

    It does if the two calls lie in the two branches of a condition on the rank. It also does if one call serves both
    tensors and such a condition has chosen the tensor, in the call or before it.
    """
    path, _, first = one.where.rpartition(":")
    path_of_other, _, second = other.where.rpartition(":")
    if path != path_of_other or not (first.isdigit() and second.isdigit()):
        return False
    choices = _choices(os.path.abspath(path))
    if one.where != other.where:
        return any(_parted(choice.lines, int(first), int(second)) for choice in choices)
    around = min((choice.around for choice in choices if int(first) in choice.around), key=len, default=None)
    return any(_parted(choice.names, one.text, other.text) for choice in choices if choice.around == around)


def _parted(sides: tuple[range, range] | tuple[frozenset[str], frozenset[str]], one: object, other: object) -> bool:
    """Return whether one is on the first side only and the other on the second side only, or the reverse."""
    left, right = sides
    here, there = (one in left, one in right), (other in left, other in right)
    return {here, there} == {(True, False), (False, True)}


@lru_cache(maxsize=256)
def _choices(path: str) -> tuple[_Choice, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return ()
    of_rank, found = _made_of_rank(tree), []
    for around, node in _inside(tree, _FILE):
        if isinstance(node, ast.If | ast.IfExp) and not of_rank.isdisjoint(_known(node.test, around)):
            one, other = (node.body, node.orelse) if isinstance(node, ast.If) else ([node.body], [node.orelse])
            names = frozenset(_names(one)), frozenset(_names(other))
            found.append(_Choice(around, (_lines(one), _lines(other)), names))
    return tuple(found)


def _inside(node: ast.AST, around: range) -> Iterator[tuple[range, ast.AST]]:
    """Yield every node below ``node``, with the lines of the function that contains it."""
    for child in ast.iter_child_nodes(node):
        yield around, child
        yield from _inside(child, _lines([child]) if isinstance(child, ast.FunctionDef) else around)


def _made_of_rank(tree: ast.Module) -> frozenset[_Word]:
    """Return every word of the file that contains "rank", and the variables and functions derived from such words."""
    made = {(_FILE, word) for word in _words(tree) if "rank" in word.lower()}
    sources = [(targets, frozenset(_known(value, around))) for targets, value, around in _definitions(tree)]
    grows = True
    while grows:
        more = {word for words, known in sources if not made.isdisjoint(known) for word in words}
        grows = not more <= made
        made |= more
    return frozenset(made)


def _definitions(tree: ast.Module) -> Iterator[tuple[list[_Word], ast.AST, range]]:
    """Yield each assigned value with its targets, and each returned value with the name of its function."""
    for around, node in _inside(tree, _FILE):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield [word for target in targets for word in _assigned(target, around)], node.value, around
        elif isinstance(node, ast.FunctionDef):
            for inside, inner in _inside(node, _lines([node])):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield [(_FILE, node.name)], inner.value, inside


def _known(tree: ast.AST, around: range) -> Iterator[_Word]:
    """Yield each word of the code twice: as a word of its function and as a word of the file."""
    for word in _words(tree):
        yield around, word
        yield _FILE, word


def _assigned(target: ast.expr, around: range) -> Iterator[_Word]:
    """Yield the words of an assignment target: variables belong to the function, attributes to the file."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _assigned(element, around)
    elif isinstance(target, ast.Name):
        yield around, target.id
    elif isinstance(target, ast.Attribute):
        yield _FILE, target.attr


def _words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        word = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
        if isinstance(word, str):
            yield word


def _names(body: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the variables, attributes and items of a branch in the spelling of ast, which :class:`Name` also uses."""
    for node in (inner for outer in body for inner in ast.walk(outer)):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            yield ast.unparse(node)


def _lines(body: Sequence[ast.AST]) -> range:
    return range(body[0].lineno, body[-1].end_lineno + 1) if body else range(0)  # type: ignore[attr-defined]
