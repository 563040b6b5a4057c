"""Only ``pdlcheck/compat`` touches private names of other packages; ruff's SLF rules find attributes, this the rest."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pdlcheck

PACKAGE = Path(pdlcheck.__file__).parent
NOT_HELD_YET = ()

DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_make", "_replace"}
BY_NAME = {"getattr": 1, "setattr": 1, "hasattr": 1, "delattr": 1, "getattr_static": 1, "Patch": 1, "attrgetter": 0}
IMPORTS = ("import_module", "__import__", "find_spec")


def _is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not dunder and name not in DOCUMENTED and not name.startswith("_pdlcheck_")


def _is_private_path(path: str) -> bool:
    first, *_ = parts = path.split(".")
    return first != "pdlcheck" and any(map(_is_private, parts))


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return the names of a module that hold strings."""
    found = {}
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for name, text in pairs:
                if isinstance(name, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[name.id] = text.value
    return found


def _text(node: ast.AST, constants: dict[str, str]) -> str | None:
    """Return the text of a string, of a constant of the module, or the fixed beginning of an f-string."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return constants.get(name)
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return text
    return None


def _own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the private names of other packages that a file imports or passes as strings, with their lines."""
    tree = ast.parse(source)
    constants = _constants(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, one.name) for one in aliases if _is_private_path(one.name))
            case ast.ImportFrom(module=str(module), names=aliases):
                paths = (f"{module}.{one.name}" for one in aliases)
                yield from ((node.lineno, path) for path in paths if _is_private_path(path))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args):
                if name in IMPORTS and args and _is_private_path(_text(args[0], constants) or ""):
                    yield node.lineno, _text(args[0], constants) or ""
                place = BY_NAME.get(name)
                if place is None or len(args) <= place or (place and _own(args[0])):
                    continue
                text = _text(args[place], constants)
                if text is not None and any(map(_is_private, text.split("."))):
                    yield node.lineno, text
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars"), args=[owner]) | ast.Attribute(value=owner, attr="__dict__")
            ):
                text = _text(node.slice, constants)
                if text is not None and _is_private(text) and not _own(owner):
                    yield node.lineno, text


def _is_held(path: Path) -> bool:
    return path.relative_to(PACKAGE).parts[0] not in ("compat", *NOT_HELD_YET)


@pytest.mark.parametrize(
    "path", sorted(filter(_is_held, PACKAGE.rglob("*.py"))), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_private_names_of_other_packages_stand_in_compat(path):
    found = [f"{path.name}:{line}: {name}" for line, name in private_names(path.read_text())]
    assert not found, f"take these from pdlcheck.compat, or from a public name: {', '.join(found)}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import _pytest.logging", "_pytest.logging"),
        ("import torch._C as c", "torch._C"),
        ("from _pytest import runner", "_pytest.runner"),
        ("from hypothesis.control import _current_build_context", "hypothesis.control._current_build_context"),
        (
            "def late():\n    from hypothesis.strategies._internal import random",
            "hypothesis.strategies._internal.random",
        ),
        ("import importlib\nimportlib.import_module('torch._dynamo')", "torch._dynamo"),
        ("from importlib import import_module\nimport_module(f'_pytest.{name}')", "_pytest."),
        ("getattr(config, '_tmp_path_factory', None)", "_tmp_path_factory"),
        ("hasattr(manager, '_get_all_fixture_defs')", "_get_all_fixture_defs"),
        ("setattr(item, '_obj', body)", "_obj"),
        ("delattr(item, '_request')", "_request"),
        ("_NAME = '_settings'\ngetattr(function, _NAME, None)", "_settings"),
        ("_ONE, _OTHER = '_settings', 'x'\ndef f(a):\n    return hasattr(a, _ONE)", "_settings"),
        ("from operator import attrgetter\nof = attrgetter('grad_fn._saved_self')", "grad_fn._saved_self"),
        ("Patch(torch.Tensor, '_version', make, 'why')", "_version"),
        ("vars(module)['_patch']", "_patch"),
        ("module.__dict__['_patch']", "_patch"),
    ],
)
def test_a_private_name_is_found(source, name):
    assert [found for _, found in private_names(source)] == [name]


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations",
        "import pdlcheck._own",
        "import os\ngetattr(os, '_exit')(0)",
        "getattr(value, '__notes__', [])",
        "_MINE = '_pdlcheck_own_settings'\nhasattr(function, _MINE)",
        "class A:\n    def f(self):\n        return getattr(self, '_cached', None)",
        "getattr(value, 'name')",
        "getattr(value, name)",
        "vars(value)['name']",
    ],
)
def test_other_names_are_left_alone(source):
    assert list(private_names(source)) == []
