"""The packages that a program imports, as its text says."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from importlib.util import find_spec

from pdlcheck.scripts.program import Program

__all__ = ["imported_packages"]

_MOST = 200  # files of a program that are read


def imported_packages(program: Program) -> set[str]:
    """Return the packages outside the program that its files import, such as ``torch`` and ``accelerate``.

    The files are the script and those modules beside it, or below the working directory, that it imports.
    """
    first = program.path
    if program.is_module:
        spec = find_spec(program.target)
        first = (spec.origin if spec is not None else None) or ""
    places = [os.path.dirname(first), os.getcwd()]
    packages: set[str] = set()
    files = [first]
    read: set[str] = set()
    while files and len(read) < _MOST:
        path = files.pop()
        if path in read:
            continue
        read.add(path)
        for name in _imports(path):
            own = [*_files_of(name, [os.path.dirname(path), *places])]
            files += own
            if not own:
                packages.add(name.partition(".")[0])
    return packages


def _imports(path: str) -> Iterator[str]:
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            yield name
            yield from (f"{name}.{one.name}".lstrip(".") for one in node.names)


def _files_of(name: str, places: list[str]) -> Iterator[str]:
    below = name.replace(".", os.sep)
    for place in dict.fromkeys(places):
        for path in (os.path.join(place, f"{below}.py"), os.path.join(place, below, "__init__.py")):
            if name and os.path.isfile(path):
                yield path
