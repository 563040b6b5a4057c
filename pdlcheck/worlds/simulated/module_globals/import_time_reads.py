"""Globals that a module computes from a launcher's variables at import, such as ``RANK = int(os.environ["RANK"])``.

A process imports the module with its own rank in the environment. Simulated ranks share what the controller imported,
where no rank is set. A program that then runs as if it had one rank passes for the wrong reason. The globals of such a
module cannot differ between ranks without a second import, so the user gets a warning.
"""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

from pdlcheck.worlds.observe.callsite import short
from pdlcheck.worlds.simulated.module_globals.mutable_state import user_modules

__all__ = ["ImportTimeRead", "early_reads", "unreported"]

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_READERS = ("environ", "getenv")
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_known: dict[tuple[str, str], tuple[ImportTimeRead, ...]] = {}  # by name of the module and file
_told: set[ImportTimeRead] = set()
_looked_at = 0  # the number of imported modules when all early reads had been reported


@dataclass(frozen=True)
class ImportTimeRead:
    """A module global ``name`` that is made of ``variable`` at ``place``, and that functions of the module use."""

    name: str
    variable: str
    place: str

    def __str__(self) -> str:
        return f"{self.name} is made of {self.variable} at {self.place}"


def early_reads() -> list[ImportTimeRead]:
    """Return the early reads of all imported user modules."""
    return [one for name, module in user_modules().items() for one in _of_module(name, module)]


def unreported() -> list[ImportTimeRead]:
    """Return the early reads that this process has not reported yet."""
    global _looked_at
    if _looked_at == len(sys.modules):
        return []
    _looked_at = len(sys.modules)
    new = [one for one in early_reads() if one not in _told]
    _told.update(new)
    return new


def _of_module(name: str, module: ModuleType) -> tuple[ImportTimeRead, ...]:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return ()
    if (name, file) not in _known:
        _known[name, file] = tuple(_of_file(name, file))
    return _known[name, file]


def _of_file(module: str, file: str) -> Iterator[ImportTimeRead]:
    try:
        source = Path(file).read_text(encoding="utf-8")
        if not any(reader in source for reader in _READERS) or not any(name in source for name in _VARIABLES):
            return
        tree = ast.parse(source)
        used = frozenset(_globals_of_functions(compile(tree, file, "exec", dont_inherit=True)))
    except (OSError, ValueError, SyntaxError, RecursionError):  # not a Python file, or changed since its import
        return
    made = {name for statement in _statements(tree.body) for name in _targets(statement)}
    for statement in _statements(tree.body):
        for name, value in _made_of(statement, made):
            if name in used and (variable := _variable_read(value)):
                yield ImportTimeRead(f"{module}.{name}", variable, f"{short(file)}:{value.lineno}")


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, also in its branches and loops.

    The part of a script below ``if __name__ == "__main__"`` is left out.
    """
    for statement in body:
        if isinstance(statement, ast.If) and "__name__" in {getattr(n, "id", "") for n in ast.walk(statement.test)}:
            continue
        yield statement
        for inner in ("body", "orelse", "finalbody"):
            if not isinstance(statement, (*_LATER, ast.ClassDef)):
                yield from _statements(getattr(statement, inner, []))


def _targets(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that an assignment defines."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))


def _made_of(statement: ast.stmt, made: set[str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield names, each with an expression that its value is computed from.

    The expression is the assigned value, or a keyword argument of a method that is called on the object, for example on
    a parser.
    """
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        for name in _targets(statement):
            yield name, statement.value
    elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(receiver, ast.Name) and receiver.id in made:
            for keyword in call.keywords:
                yield receiver.id, keyword.value


def _variable_read(value: ast.expr) -> str:
    """Return the launcher's variable that the expression reads at once; empty if it reads none."""
    found = list(_at_once(value))
    reads = any(getattr(node, "id", getattr(node, "attr", "")) in _READERS for node in found)
    names = [node.value for node in found if isinstance(node, ast.Constant) and node.value in _VARIABLES]
    return names[0] if reads and names else ""


def _at_once(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, _LATER):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _at_once(child)


def _globals_of_functions(code: CodeType) -> Iterator[str]:
    """Yield the names that the functions of a module, including its methods, look up in its globals."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from (i.argval for i in dis.get_instructions(inner) if i.opname == "LOAD_GLOBAL")
            yield from _globals_of_functions(inner)
