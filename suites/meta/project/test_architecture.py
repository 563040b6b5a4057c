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
    "explanation": {"exit_codes", "operations"},
    "extras": set(),
    "faults": set(),
    "launch": {"time_budgets"},
    "time_budgets": set(),
    "installed": set(),
    "json_values": set(),
    "operations": {"compat", "errors", "uncompiled"},
    "primitives": {"compat", "control_groups", "cores", "errors", "extras", "tensor_bytes", "uncompiled"},
    "tensor_bytes": set(),
    "tracing": {"compat", "errors", "exit_codes", "extras"},
    "uncompiled": {"compat"},
    "worlds": {
        "clock",
        "compat",
        "cores",
        "errors",
        "extras",
        "faults",
        "launch",
        "operations",
        "tensor_bytes",
        "time_budgets",
        "uncompiled",
    },
    "checks": {"compat", "errors", "operations", "seen_conditions"},
    "seen_conditions": set(),
    "bench": {"clock", "cores", "errors", "extras", "operations"},
    "report": {"bench", "errors"},
    "harness": {
        "bench",
        "compat",
        "errors",
        "faults",
        "json_values",
        "launch",
        "report",
        "seen_conditions",
        "strategies",
        "time_budgets",
        "worlds",
    },
    "strategies": {"faults", "worlds"},
    "item_runners": {"bench", "compat", "errors", "faults", "harness", "launch", "time_budgets", "worlds"},
    "scripts": {
        "compat",
        "errors",
        "exit_codes",
        "faults",
        "json_values",
        "launch",
        "operations",
        "report",
        "whole_numbers",
        "worlds",
    },
    "watching": {"errors", "uncompiled"},
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
    "mpi": ("launched", "processes", "simulated"),
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
    assert not wrong, f"{path.name}: ask the world's item runner (harness/item_runner.py) instead of {wrong}"


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


Arrows = dict[str, set[str]]  # module -> the modules that it imports


def _arrows(sources: dict[str, str]) -> Arrows:
    """Return the imports of each module, also those inside functions.

    Imports under ``if TYPE_CHECKING`` are left out: they name a type, and nothing runs.
    """
    arrows: Arrows = {}
    for module, source in sources.items():
        names: set[str] = set()
        todo: list[ast.AST] = [ast.parse(source)]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                todo += node.orelse
                continue
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inside = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                names |= {one if one in sources else str(node.module) for one in inside.values()}
            todo += ast.iter_child_nodes(node)
        arrows[module] = names & sources.keys()
    return arrows


def _circles(arrows: Arrows, folder: str) -> list[list[str]]:
    """Return the circles among the sub-folders and files of a folder in which a sub-folder takes part.

    Files count one by one: the shared files of a folder may be imported by its sub-folders, and another file, such as
    its ``__init__.py``, may import the sub-folders.
    """
    inside = folder + "."
    below: Arrows = {}
    is_folder = set()
    for module, imported in arrows.items():
        if module.startswith(inside):
            name, _, rest = module.removeprefix(inside).partition(".")
            is_folder |= {name} if rest else set()
            below.setdefault(name, set()).update(
                other.removeprefix(inside).partition(".")[0] for other in imported if other.startswith(inside)
            )
    reached = {name: _reached(below, name) for name in below}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in below}
    return sorted(sorted(circle) for circle in circles if len(circle) > 1 and circle & is_folder)


def _reached(below: Arrows, start: str) -> set[str]:
    """Return the parts to which a way of arrows leads."""
    reached: set[str] = set()
    todo = [start]
    while todo:
        following = below.get(todo.pop(), set()) - reached
        reached |= following
        todo += following
    return reached


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


FOLDERS = sorted(_module(path) for path in PACKAGE.rglob("__init__.py"))


@pytest.fixture(scope="module")
def arrows():
    return _arrows({_module(path): path.read_text() for path in PACKAGE.rglob("*.py")})


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_circle_among_the_parts_of_a_folder(folder, arrows):
    circles = _circles(arrows, folder)
    assert not circles, "\n".join(f"{folder}: {' and '.join(circle)} import one another" for circle in circles)


def test_a_circle_is_seen_and_one_of_types_alone_is_not():
    sources = {
        "house": "",
        "house.engine": "",
        "house.engine.post": "from house.engine.work import Work",
        "house.engine.work": "def wait():\n    from house.observers import traffic",
        "house.observers": "",
        "house.observers.traffic": "from house import shared\nimport house.shared",
        "house.shared": "import house.engine.post",
    }
    assert _circles(_arrows(sources), "house") == [["engine", "observers", "shared"]]
    assert _circles(_arrows(sources), "house.engine") == []
    sources["house.engine.work"] = "if TYPE_CHECKING:\n    from house.observers import traffic"
    assert _circles(_arrows(sources), "house") == []


FLOORS = ["schedules", "scheduling", "engine", "observers", "process_state", "module_globals", "c10d"]  # of simulated/


@pytest.mark.parametrize("floor", FLOORS)
def test_the_simulated_world_has_its_floors(floor, arrows):
    inside = "pdlcheck.worlds.simulated."
    above = FLOORS[FLOORS.index(floor) + 1 :]
    for module in (one for one in arrows if one.startswith(f"{inside}{floor}.")):
        wrong = {one.removeprefix(inside).partition(".")[0] for one in arrows[module] if one.startswith(inside)}
        assert wrong.isdisjoint(above), f"{module} must not import {', '.join(sorted(wrong & set(above)))}"


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
