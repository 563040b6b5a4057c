"""The imports between the folders, the public names, and the cost of importing the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pdlcheck

PACKAGE = Path(pdlcheck.__file__).parent
MAY_IMPORT = {
    "clock": {"errors", "operations"},
    "compat": set(),
    "control_groups": set(),
    "cores": {"control_groups"},
    "errors": set(),
    "extras": set(),
    "faults": set(),
    "launch": set(),
    "installed": set(),
    "operations": {"compat", "errors", "uncompiled"},
    "primitives": {"compat", "control_groups", "cores", "errors", "extras", "uncompiled"},
    "uncompiled": {"compat"},
    "worlds": {"clock", "compat", "cores", "errors", "extras", "faults", "launch", "operations", "uncompiled"},
    "checks": {"compat", "errors"},
    "bench": {"clock", "cores", "errors", "extras", "operations"},
    "report": {"bench", "errors"},
    "harness": {"bench", "compat", "errors", "faults", "launch", "report", "strategies", "worlds"},
    "strategies": {"faults", "worlds"},
    "item_runners": {"bench", "compat", "errors", "faults", "harness", "launch", "worlds"},
    "plugin": {"compat", "errors", "harness", "item_runners", "launch", "worlds"},
    "whole_numbers": set(),
}


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(source: str) -> set[str]:
    """Return the top-level parts of pdlcheck that a file imports, at any depth, type checking included."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("pdlcheck.")}
    return rooms


def _forbidden(room: str, source: str) -> set[str]:
    return _imports(source) - MAY_IMPORT[room] - {room, "__version__"}


FILES = sorted(path for path in PACKAGE.rglob("*.py") if _room(path) in MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path):
    wrong = _forbidden(_room(path), path.read_text())
    assert not wrong, f"{path.name} in {_room(path)}/ must not import {', '.join(sorted(wrong))}"


APART = {  # inside of worlds/
    "agents": ("launched", "mpi", "ray", "remote", "simulated"),
    "remote": ("launched", "mpi", "ray", "simulated"),
    "ray": ("launched", "mpi", "simulated"),
    "simulated": ("launched", "mpi", "processes"),
    "observe": ("launched", "mpi", "processes", "simulated"),
    "processes": ("launched", "simulated"),
    "mpi": ("launched", "simulated"),
    "launched": ("mpi", "simulated"),
}


@pytest.mark.parametrize(("room", "others"), APART.items(), ids=APART)
def test_the_kinds_of_worlds_do_not_import_one_another(room, others):
    for path in sorted((PACKAGE / "worlds" / room).rglob("*.py")):
        wrong = [other for other in others if f"pdlcheck.worlds.{other}" in _modules(path.read_text())]
        assert not wrong, f"{path.relative_to(PACKAGE)} must not import worlds/{', '.join(wrong)}"


def _inside_of_worlds(source: str) -> set[str]:
    """Return the modules inside of the folders of ``pdlcheck.worlds`` that a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    folders = [path.name for path in (PACKAGE / "worlds").iterdir() if path.is_dir()]
    return {name for name in names if any(f"{name}.".startswith(f"pdlcheck.worlds.{one}.") for one in folders)}


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "harness").rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_the_harness_asks_for_capabilities_and_knows_no_world(path):
    wrong = _inside_of_worlds(path.read_text())
    assert not wrong, f"{path.name}: ask the world's item runner (harness/running/item_runner.py) instead of {wrong}"


def test_an_import_from_inside_of_a_world_is_seen():
    assert _inside_of_worlds("def f():\n    from pdlcheck.worlds.simulated import SimulatedWorld")
    assert _inside_of_worlds("import pdlcheck.worlds.processes.ranks")
    assert not _inside_of_worlds("from pdlcheck.worlds.registry import get_world")


def _modules(source: str) -> set[str]:
    """Return the packages of worlds that a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {".".join(f"{node.module}.{alias.name}".split(".")[:3]) for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {".".join(alias.name.split(".")[:3]) for alias in node.names}
    return names


def test_an_arrow_in_the_wrong_direction_is_seen():
    assert "pdlcheck.worlds.processes" in _modules("from pdlcheck.worlds.processes.ranks import ProcessRanks")
    assert _forbidden("checks", "from pdlcheck.primitives import ring_pass") == {"primitives"}
    assert _forbidden("worlds", "def f():\n    import pdlcheck.checks.comm.collectives") == {"checks"}
    assert _forbidden("harness", "from pdlcheck.worlds import World") == set()


def _public(path: Path) -> list[str] | None:
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(getattr(target, "id", "") == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_names_are_declared_and_sorted(path):
    names = _public(path)
    if names is None:
        assert path.stem in {"__init__", "plugin"}, f"{path.name} has no __all__"
        return
    constants_first = sorted(names, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))
    assert names == constants_first, f"{path.name}: __all__ is sorted: constants, classes, functions"


def test_importing_the_package_imports_nothing_heavy():
    heavy = ("torch", "numba", "hypothesis")
    code = f"import sys, pdlcheck, pdlcheck.plugin; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
